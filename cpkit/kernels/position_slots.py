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

positions: [num_tokens, k] int32 or int64, negative: none. req: [num_tokens] int32, or through idx_mapping ([num_reqs]
int32, a negative entry counts as row 0) row of block_tables [num_rows, width] int32. out: [num_tokens, k] int64, or
int32 where the caller knows that the rows fit; it may be positions. counts: [num_tokens] int32.
"""

import torch
import triton
import triton.language as tl

from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import INTS, check_positive, check_shard, check_tensor
from cpkit.kernels.dcp_local_lens import owners_of_positions, shard_constants, split_position
from cpkit.planner.slots import PAD

COLUMNS, NUM_WARPS = 1024, 4
"""Positions of one token that a program takes at once, and its warps."""


def shard_slots_reference(
    positions: torch.Tensor,
    req: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    block_stride: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    idx_mapping: torch.Tensor | None = None,
) -> torch.Tensor:
    if not block_tables.numel() or (idx_mapping is not None and not idx_mapping.numel()):
        return torch.full_like(positions, PAD)
    row, known = _inside(req.long(), block_tables.shape[0] if idx_mapping is None else idx_mapping.numel())
    if idx_mapping is not None:
        row, inside = _inside(idx_mapping[row].long().clamp(min=0), block_tables.shape[0])
        known &= inside
    owner, local = split_position(positions.clamp(min=0).long(), dcp_size, interleave)
    column = local // block_size
    last = block_tables.shape[1] - 1
    block = block_tables[row[:, None], column.clamp(max=last)].long()
    here = (positions >= 0) & (owner == dcp_rank) & (column <= last) & known[:, None] & (block >= 0)
    return torch.where(here, block * block_stride + local % block_size, PAD)


def _inside(index: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices with 0 for those that are none of size, and which of them are."""
    known = (index >= 0) & (index < size)
    return torch.where(known, index, 0), known


def gathered_slots_reference(
    positions: torch.Tensor,
    workspace_start: torch.Tensor,
    *,
    rank_stride: int,
    dcp_size: int,
    interleave: int,
) -> torch.Tensor:
    owner, local = split_position(positions.clamp(min=0).long(), dcp_size, interleave)
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
    block_tables: torch.Tensor,
    *,
    block_size: int,
    block_stride: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    idx_mapping: torch.Tensor | None = None,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the cache row of each position that this rank owns; block_stride: rows from one block to the next."""
    check_backend("shard_slots", backend, BACKENDS, compiled=_shard_slots_kernel, device=positions.device)
    check_shard(dcp_size, dcp_rank, interleave)
    _check_cache(positions, req, block_tables, idx_mapping, block_size, block_stride, out)
    if backend == "torch":
        shard = {"dcp_size": dcp_size, "dcp_rank": dcp_rank, "interleave": interleave}
        sizes = {"block_size": block_size, "block_stride": block_stride, **shard}
        out.copy_(shard_slots_reference(positions, req, block_tables, **sizes, idx_mapping=idx_mapping))
    elif out.numel():
        constants = slot_constants(block_size, dcp_size, interleave)
        grid = (out.shape[0], triton.cdiv(out.shape[1], COLUMNS))
        pointers = _pointers(req, block_tables, idx_mapping)
        numbers = _numbers(positions, block_tables, idx_mapping, out)
        _shard_slots_kernel[grid](positions, *pointers, out, *numbers, block_stride, dcp_rank, **constants)


def compact_shard_slots(
    positions: torch.Tensor,
    req: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    block_stride: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    idx_mapping: torch.Tensor | None = None,
    out: torch.Tensor,
    counts: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the cache rows of the positions that this rank owns, moved to the front, and how many there are."""
    check_backend("compact_shard_slots", backend, BACKENDS, compiled=_compact_kernel, device=positions.device)
    check_shard(dcp_size, dcp_rank, interleave)
    _check_cache(positions, req, block_tables, idx_mapping, block_size, block_stride, out)
    check_tensor("counts", counts, torch.int32, (out.shape[0],), out.device)
    if backend == "torch":
        shard = {"dcp_size": dcp_size, "dcp_rank": dcp_rank, "interleave": interleave}
        sizes = {"block_size": block_size, "block_stride": block_stride, **shard}
        slots = shard_slots_reference(positions, req, block_tables, **sizes, idx_mapping=idx_mapping)
        _store_compact(slots, out, counts)
    elif out.shape[0]:
        constants = {"REMAP": True, **slot_constants(block_size, dcp_size, interleave)}
        pointers = _pointers(req, block_tables, idx_mapping)
        numbers = _numbers(positions, block_tables, idx_mapping, out)
        grid = (out.shape[0],)
        _compact_kernel[grid](positions, *pointers, out, counts, *numbers, block_stride, dcp_rank, **constants)


def gathered_slots(
    positions: torch.Tensor,
    workspace_start: torch.Tensor,
    *,
    rank_stride: int,
    dcp_size: int,
    interleave: int,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the workspace row of each position, whoever owns it.

    workspace_start: [num_tokens] int32 or int64, first row of the token's request in every rank's part.
    """
    check_backend("gathered_slots", backend, BACKENDS, compiled=_gathered_slots_kernel, device=positions.device)
    check_shard(dcp_size, 0, interleave)
    check_positive(rank_stride=rank_stride)
    _check_places(positions, out)
    check_tensor("workspace_start", workspace_start, INTS, (positions.shape[0],), positions.device)
    if backend == "torch":
        sizes = {"rank_stride": rank_stride, "dcp_size": dcp_size, "interleave": interleave}
        out.copy_(gathered_slots_reference(positions, workspace_start, **sizes))
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
            **shard_constants(dcp_size, interleave),
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
        numbers = (out.shape[1], 0, -1, 0, slots.stride(0), 0, out.stride(0))
        constants = {"REMAP": False, **slot_constants(1, 1, 1)}
        _compact_kernel[(out.shape[0],)](slots, *pointers, out, counts, *numbers, 0, 0, **constants)


def slot_constants(block_size: int, dcp_size: int, interleave: int) -> dict[str, int]:
    """How the kernels are compiled and launched for one cache."""
    shard = shard_constants(dcp_size, interleave)
    return {"BLOCK_SIZE": block_size, **shard, "COLUMNS": COLUMNS, "num_warps": NUM_WARPS}


def _store_compact(slots: torch.Tensor, out: torch.Tensor, counts: torch.Tensor) -> None:
    front, kept = compact_slots_reference(slots)
    out.copy_(front)
    counts.copy_(kept)


def _pointers(
    req: torch.Tensor, block_tables: torch.Tensor, idx_mapping: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    return req, req if idx_mapping is None else idx_mapping, block_tables  # a None would make a second kernel


def _numbers(
    positions: torch.Tensor, block_tables: torch.Tensor, idx_mapping: torch.Tensor | None, out: torch.Tensor
) -> tuple[int, ...]:
    num_mapped = -1 if idx_mapping is None else idx_mapping.numel()
    strides = positions.stride(0), block_tables.stride(0), out.stride(0)
    return out.shape[1], block_tables.shape[0], num_mapped, block_tables.shape[1], *strides


def _check_places(positions: torch.Tensor, out: torch.Tensor) -> None:
    check_tensor("positions", positions, INTS, (None, None), positions.device)
    check_tensor("out", out, INTS, tuple(positions.shape), positions.device)


def _check_cache(
    positions: torch.Tensor,
    req: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    block_size: int,
    block_stride: int,
    out: torch.Tensor,
) -> None:
    check_positive(block_size=block_size, block_stride=block_stride)
    _check_places(positions, out)
    check_tensor("req", req, torch.int32, (positions.shape[0],), positions.device)
    check_tensor("block_tables", block_tables, torch.int32, (None, None), positions.device)
    if idx_mapping is not None:
        check_tensor("idx_mapping", idx_mapping, torch.int32, (None,), positions.device)
