"""From kept positions to physical rows: of this rank's shard of the cache, or of a gathered prefill workspace.

block_size=2, dcp_size=2, interleave=1, block table 4 6:

    position                      5  2  0 -1  3
    shard_slots, rank 0           -  9  8  -  -       - is -1: no position, another rank's, behind the block table, in a
    shard_slots, rank 1          12  -  -  -  9       block below 0, or of no request
    compact_shard_slots, rank 0   9  8  -  -  -       2 kept, in their former order: every run gives the same list

rank_stride=4, workspace_start=1, parts of 4 rows a rank:

    workspace              .  t0 t2 t4 | .  t1 t3 --
    position               3  0 -1
    gathered_slots         6  1  -              owner * rank_stride + workspace_start + local

positions: [num_tokens, k] int32 or int64, in keys, negative: none. req: [num_tokens] int32. shard: interleave in keys.
out: [num_tokens, k] int64, or int32 where the caller knows that the rows fit; it may be positions. counts: [num_tokens]
int32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import INTS, check_positive, check_tensor
from cpkit.kernels.dcp_local_lens import owners_of_positions, shard_constants, split_position
from cpkit.planner.slots import PAD
from cpkit.topology import Shard

COLUMNS, NUM_WARPS = 1024, 4
"""Positions of one token that a program takes at once, and its warps."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyBlocks:
    """Where a cache keeps the keys of each request.

    block_tables: [num_rows, width] int32. block_size: keys of a block. block_stride: cache rows from one block to the
    next, more than block_size where pages hold other tensors too. idx_mapping: [num_reqs] int32, row of block_tables of
    each request, a negative entry counts as row 0; None: rows are requests.
    """

    block_tables: torch.Tensor
    block_size: int
    block_stride: int
    idx_mapping: torch.Tensor | None = None

    def check(self, device: torch.device) -> None:
        """Raise PlanError unless kernels can address it."""
        check_positive(block_size=self.block_size, block_stride=self.block_stride)
        check_tensor("block_tables", self.block_tables, torch.int32, (None, None), device)
        if self.idx_mapping is not None:
            check_tensor("idx_mapping", self.idx_mapping, torch.int32, (None,), device)


def shard_slots_reference(positions: torch.Tensor, req: torch.Tensor, blocks: KeyBlocks, shard: Shard) -> torch.Tensor:
    block_tables, idx_mapping = blocks.block_tables, blocks.idx_mapping
    if not block_tables.numel() or (idx_mapping is not None and not idx_mapping.numel()):
        return torch.full_like(positions, PAD)
    row, known = _inside(req.long(), block_tables.shape[0] if idx_mapping is None else idx_mapping.numel())
    if idx_mapping is not None:
        row, inside = _inside(idx_mapping[row].long().clamp(min=0), block_tables.shape[0])
        known &= inside
    owner, local = split_position(positions.clamp(min=0).long(), shard.dcp_size, shard.interleave)
    column = local // blocks.block_size
    last = block_tables.shape[1] - 1
    block = block_tables[row[:, None], column.clamp(max=last)].long()
    here = (positions >= 0) & (owner == shard.dcp_rank) & (column <= last) & known[:, None] & (block >= 0)
    return torch.where(here, block * blocks.block_stride + local % blocks.block_size, PAD)


def _inside(index: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices with 0 for those that are none of size, and which of them are."""
    known = (index >= 0) & (index < size)
    return torch.where(known, index, 0), known


def gathered_slots_reference(
    positions: torch.Tensor, workspace_start: torch.Tensor, shard: Shard, *, rank_stride: int
) -> torch.Tensor:
    owner, local = split_position(positions.clamp(min=0).long(), shard.dcp_size, shard.interleave)
    row = workspace_start.long()[:, None] + local
    return torch.where((positions >= 0) & (row < rank_stride), owner * rank_stride + row, PAD)


def compact_slots_reference(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = slots != PAD
    order = torch.argsort((~kept).int(), dim=1, stable=True)
    return torch.gather(slots, 1, order), kept.sum(1).int()


@triton.jit
def _row_of_token(req, idx_mapping, token, num_rows, num_mapped, width):
    """Block table row of a token, and how wide it is: 0 where the token is of no request. num_mapped=-1: no mapping."""
    row = tl.load(req + token)
    if num_mapped >= 0:
        inside = (row >= 0) & (row < num_mapped)
        row = tl.load(idx_mapping + tl.where(inside, row, 0), mask=inside, other=num_rows)
        row = tl.maximum(row, 0)
    inside = (row >= 0) & (row < num_rows)
    return tl.where(inside, row, 0).to(tl.int64), tl.where(inside, width, 0)


@triton.jit
def _slots_of_positions(
    pos, table, width, block_stride, dcp_rank,
    BLOCK_SIZE: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """Cache rows of one token's positions, int64, -1 for none; table: its block table row, of `width` entries."""
    owner, local = owners_of_positions(tl.maximum(pos, 0), DCP_SIZE, INTERLEAVE)
    entry = local // BLOCK_SIZE
    here = (pos >= 0) & (owner == dcp_rank) & (entry < width)
    block = tl.load(table + entry, mask=here, other=-1).to(tl.int64)
    return tl.where(block >= 0, block * block_stride + (local - entry * BLOCK_SIZE), -1)


@triton.jit(
    do_not_specialize=[
        "positions", "req", "idx_mapping", "block_tables", "out", "k", "num_rows", "num_mapped", "width",
        "position_stride", "table_stride", "out_stride", "block_stride", "dcp_rank",
    ]
)  # fmt: skip
def _shard_slots_kernel(
    positions, req, idx_mapping, block_tables, out, k: tl.int32, num_rows: tl.int32, num_mapped: tl.int32,
    width: tl.int32, position_stride: tl.int64, table_stride: tl.int64, out_stride: tl.int64, block_stride: tl.int64,
    dcp_rank: tl.int32,
    BLOCK_SIZE: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, known_width = _row_of_token(req, idx_mapping, token, num_rows, num_mapped, width)
    table = block_tables + row * table_stride
    pos = tl.load(positions + token * position_stride + column, mask=column < k, other=-1)
    slot = _slots_of_positions(pos, table, known_width, block_stride, dcp_rank, BLOCK_SIZE, DCP_SIZE, INTERLEAVE)
    tl.store(out + token * out_stride + column, slot, mask=column < k)


@triton.jit(
    do_not_specialize=[
        "positions", "req", "idx_mapping", "block_tables", "out", "counts", "k", "num_rows", "num_mapped", "width",
        "position_stride", "table_stride", "out_stride", "block_stride", "dcp_rank",
    ]
)  # fmt: skip
def _compact_kernel(
    positions, req, idx_mapping, block_tables, out, counts, k: tl.int32, num_rows: tl.int32, num_mapped: tl.int32,
    width: tl.int32, position_stride: tl.int64, table_stride: tl.int64, out_stride: tl.int64, block_stride: tl.int64,
    dcp_rank: tl.int32,
    REMAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token, COLUMNS places at a time: slots move to the front by a running count. Not REMAP: they are given.

    out may be what is read: a block is read in full before its slots are written, none of them behind its end.
    """
    token = tl.program_id(0).to(tl.int64)
    given, front = positions + token * position_stride, out + token * out_stride
    if REMAP:
        row, known_width = _row_of_token(req, idx_mapping, token, num_rows, num_mapped, width)
        table = block_tables + row * table_stride
    kept = 0
    for first in range(0, k, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        slot = tl.load(given + column, mask=column < k, other=-1)
        if REMAP:
            slot = _slots_of_positions(
                slot, table, known_width, block_stride, dcp_rank, BLOCK_SIZE, DCP_SIZE, INTERLEAVE
            )
        tl.debug_barrier()
        keep = (slot != -1) & (column < k)
        place = kept + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(front + place, slot, mask=keep)
        kept += tl.sum(keep.to(tl.int32), axis=0)
    tl.store(counts + token, kept)
    for first in range(0, k, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        tl.store(front + column, -1, mask=(column >= kept) & (column < k))


@triton.jit(
    do_not_specialize=["positions", "workspace_start", "out", "k", "position_stride", "out_stride", "rank_stride"]
)
def _gathered_slots_kernel(
    positions, workspace_start, out, k: tl.int32, position_stride: tl.int64, out_stride: tl.int64,
    rank_stride: tl.int64, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pos = tl.load(positions + token * position_stride + column, mask=column < k, other=-1)
    owner, local = owners_of_positions(tl.maximum(pos, 0), DCP_SIZE, INTERLEAVE)
    row = tl.load(workspace_start + token).to(tl.int64) + local
    slot = tl.where((pos >= 0) & (row < rank_stride), owner.to(tl.int64) * rank_stride + row, -1)
    tl.store(out + token * out_stride + column, slot, mask=column < k)


def shard_slots(
    positions: torch.Tensor,
    req: torch.Tensor,
    blocks: KeyBlocks,
    shard: Shard,
    *,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the cache row of each position that this rank owns."""
    check_backend("shard_slots", backend, BACKENDS, compiled=_shard_slots_kernel, device=positions.device)
    _check_remap(positions, req, blocks, out)
    if backend == "torch":
        out.copy_(shard_slots_reference(positions, req, blocks, shard))
    elif out.numel():
        constants = slot_constants(blocks.block_size, shard.dcp_size, shard.interleave)
        grid = (out.shape[0], triton.cdiv(out.shape[1], COLUMNS))
        numbers = _numbers(positions, blocks, shard, out)
        _shard_slots_kernel[grid](positions, *_pointers(req, blocks), out, *numbers, **constants)


def compact_shard_slots(
    positions: torch.Tensor,
    req: torch.Tensor,
    blocks: KeyBlocks,
    shard: Shard,
    *,
    out: torch.Tensor,
    counts: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the cache rows of the positions that this rank owns, moved to the front, and how many there are."""
    check_backend("compact_shard_slots", backend, BACKENDS, compiled=_compact_kernel, device=positions.device)
    _check_remap(positions, req, blocks, out)
    check_tensor("counts", counts, torch.int32, (out.shape[0],), out.device)
    if backend == "torch":
        _store_compact(shard_slots_reference(positions, req, blocks, shard), out, counts)
    elif out.shape[0]:
        constants = {"REMAP": True, **slot_constants(blocks.block_size, shard.dcp_size, shard.interleave)}
        numbers = _numbers(positions, blocks, shard, out)
        _compact_kernel[(out.shape[0],)](positions, *_pointers(req, blocks), out, counts, *numbers, **constants)


def gathered_slots(
    positions: torch.Tensor,
    workspace_start: torch.Tensor,
    shard: Shard,
    *,
    rank_stride: int,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the workspace row of each position, whoever owns it: of the shard its rank plays no part.

    workspace_start: [num_tokens] int32 or int64, first row of the token's request in every rank's part.
    """
    check_backend("gathered_slots", backend, BACKENDS, compiled=_gathered_slots_kernel, device=positions.device)
    check_positive(rank_stride=rank_stride)
    _check_places(positions, out)
    check_tensor("workspace_start", workspace_start, INTS, (positions.shape[0],), positions.device)
    if backend == "torch":
        out.copy_(gathered_slots_reference(positions, workspace_start, shard, rank_stride=rank_stride))
    elif out.numel():
        num_tokens, k = out.shape
        _gathered_slots_kernel[(num_tokens, triton.cdiv(k, COLUMNS))](
            positions,
            workspace_start,
            out,
            k,
            positions.stride(0),
            out.stride(0),
            rank_stride,
            **shard_constants(shard.dcp_size, shard.interleave),
            COLUMNS=COLUMNS,
            num_warps=NUM_WARPS,
        )


def compact_slots(slots: torch.Tensor, *, out: torch.Tensor, counts: torch.Tensor, backend: str = "torch") -> None:
    """Move each token's slots to the front of its row of out, and write how many there are.

    slots, out: [num_tokens, k] of one integer dtype, out may be slots; counts: [num_tokens] int32.
    """
    check_backend("compact_slots", backend, BACKENDS, compiled=_compact_kernel, device=slots.device)
    check_tensor("slots", slots, INTS, (None, None), slots.device)
    check_tensor("out", out, slots.dtype, tuple(slots.shape), slots.device)
    check_tensor("counts", counts, torch.int32, (slots.shape[0],), slots.device)
    if backend == "torch":
        _store_compact(slots, out, counts)
    elif out.shape[0]:
        pointers = (counts, counts, counts)  # not read
        numbers = (out.shape[1], 0, -1, 0, slots.stride(0), 0, out.stride(0), 0, 0)
        constants = {"REMAP": False, **slot_constants(1, 1, 1)}
        _compact_kernel[(out.shape[0],)](slots, *pointers, out, counts, *numbers, **constants)


def slot_constants(block_size: int, dcp_size: int, interleave: int) -> dict[str, int]:
    """How the kernels are compiled and launched for one cache."""
    shard = shard_constants(dcp_size, interleave)
    return {"BLOCK_SIZE": block_size, **shard, "COLUMNS": COLUMNS, "num_warps": NUM_WARPS}


def _store_compact(slots: torch.Tensor, out: torch.Tensor, counts: torch.Tensor) -> None:
    front, kept = compact_slots_reference(slots)
    out.copy_(front)
    counts.copy_(kept)


def _pointers(req: torch.Tensor, blocks: KeyBlocks) -> tuple[torch.Tensor, ...]:
    mapping = req if blocks.idx_mapping is None else blocks.idx_mapping  # a None would make a second kernel
    return req, mapping, blocks.block_tables


def _numbers(positions: torch.Tensor, blocks: KeyBlocks, shard: Shard, out: torch.Tensor) -> tuple[int, ...]:
    num_mapped = -1 if blocks.idx_mapping is None else blocks.idx_mapping.numel()
    num_rows, width = blocks.block_tables.shape
    strides = positions.stride(0), blocks.block_tables.stride(0), out.stride(0), blocks.block_stride
    return out.shape[1], num_rows, num_mapped, width, *strides, shard.dcp_rank


def _check_places(positions: torch.Tensor, out: torch.Tensor) -> None:
    check_tensor("positions", positions, INTS, (None, None), positions.device)
    check_tensor("out", out, INTS, tuple(positions.shape), positions.device)


def _check_remap(positions: torch.Tensor, req: torch.Tensor, blocks: KeyBlocks, out: torch.Tensor) -> None:
    _check_places(positions, out)
    check_tensor("req", req, torch.int32, (positions.shape[0],), positions.device)
    blocks.check(positions.device)
