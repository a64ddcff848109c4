"""Slots of compressed keys: the last token of every `compress_ratio` tokens writes their state.

compress_ratio=2, states_per_block=2, one request with block table 3:

    position                0  1  2  3  4
    slot of the token       9 10 11  - 13      any slot but -1: the token is written
    slot of the state       -  6  -  -  -      3 * 2 + 0; the state of 2 3 is not written: its last token has no slot

Three forms. `compressed_slots`: this rank's own tokens; under DCP a token's own slot is -1 on the ranks that do not own
it, and its state lies with it. `packed_compressed_slots`: what a PCP rank sends for its tokens under DCP, whoever owns
their states, in one number; `unpack_compressed_slots`: what a rank keeps of the gathered numbers.  dcp_size=2:

    state's slot, owner    5,0  9,1   -
    packed                  10   19  -1       slot * dcp_size + owner
    kept by rank 1           -    9   -

query_start_loc: [num_rows + 1], seq_lens, row_stride: [num_rows], int32. block_tables: [num_rows, width] int32, blocks
of states_per_block states. out: int64, reset to -1 in full, tail included. A state in the null block 0, behind the
block table or at a negative position is not written.
"""

import torch
import triton
import triton.language as tl

from cpkit.errors import ConfigError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_rows, check_shard, check_tensor
from cpkit.kernels.dcp_local_lens import owners_of_positions, shard_constants, split_position
from cpkit.kernels.token_to_req import find_positions, find_rows, positions_of_tokens, rows_of_tokens
from cpkit.planner.slots import NULL_BLOCK, PAD
from cpkit.planner.state_slots import check_states_whole

BLOCK = 256
NUM_WARPS = 4
"""Tokens of one program and its warps."""


def compressed_slots_reference(
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    compress_ratio: int,
    states_per_block: int,
    dcp_size: int = 1,
    interleave: int = 1,
    row_stride: torch.Tensor | None = None,
) -> torch.Tensor:
    slot, _ = _state_places(
        slot_mapping.numel(),
        query_start_loc,
        seq_lens,
        block_tables,
        row_stride,
        (compress_ratio, states_per_block, dcp_size, interleave),
    )
    return torch.where(slot_mapping >= 0, slot, PAD)


@triton.jit
def slots_of_positions(
    pos, row, written, block_tables, width, table_stride,
    RATIO: tl.constexpr, STATES_PER_BLOCK: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """Slot (-1: none) of the state that each position completes, and its owner, int64; pos: int64, row: int32.

    Divisions are of int32, which holds every position; addresses are int64. Lanes without a state read no block.
    """
    written = written & (pos >= 0) & (pos <= 0x7FFFFFFF)
    at = tl.where(written, pos, 0).to(tl.int32)
    owner, local = owners_of_positions(at, DCP_SIZE, INTERLEAVE)
    state = local // RATIO
    column = state // STATES_PER_BLOCK
    written = written & (at % RATIO == RATIO - 1) & (column < width)
    place = row.to(tl.int64) * table_stride + tl.where(written, column, 0)
    block = tl.load(block_tables + place, mask=written, other=0).to(tl.int64)
    slot = block * STATES_PER_BLOCK + (state - column * STATES_PER_BLOCK)
    return tl.where(block > 0, slot, -1), owner.to(tl.int64)


@triton.jit(
    do_not_specialize=[
        "tokens", "query_start_loc", "seq_lens", "row_stride", "block_tables", "out", "strided", "num_rows", "width",
        "table_stride", "num_tokens", "num_out",
    ],
)  # fmt: skip
def _compressed_slots_kernel(
    tokens, query_start_loc, seq_lens, row_stride, block_tables, out,
    strided: tl.int32, num_rows: tl.int32, width: tl.int32, table_stride: tl.int64, num_tokens: tl.int64,
    num_out: tl.int64,
    RATIO: tl.constexpr, STATES_PER_BLOCK: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tokens: the tokens' own slots, or (PACKED) which of them write; out is written in full."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_step = (token < num_tokens) & (token < tl.load(query_start_loc + num_rows))
    if PACKED:
        written = in_step & (tl.load(tokens + token, mask=in_step, other=0) != 0)
    else:
        written = in_step & (tl.load(tokens + token, mask=in_step, other=-1) >= 0)
    row = rows_of_tokens(query_start_loc, token, num_rows)
    pos = positions_of_tokens(query_start_loc, seq_lens, row_stride, token, row, strided)
    slot, owner = slots_of_positions(
        pos, row, written, block_tables, width, table_stride, RATIO, STATES_PER_BLOCK, DCP_SIZE, INTERLEAVE
    )
    if PACKED:
        slot = tl.where(slot >= 0, slot * DCP_SIZE + owner, -1)
    tl.store(out + token, slot, mask=token < num_out)


@triton.jit(do_not_specialize=["packed", "out", "dcp_rank", "num_packed", "num_out"])
def _unpack_kernel(
    packed, out, dcp_rank: tl.int64, num_packed: tl.int64, num_out: tl.int64,
    DCP_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    both = tl.load(packed + i, mask=i < num_packed, other=-1)
    slot = both // DCP_SIZE
    mine = (both >= 0) & (both - slot * DCP_SIZE == dcp_rank)
    tl.store(out + i, tl.where(mine, slot, -1), mask=i < num_out)


def compressed_slots(
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    compress_ratio: int,
    states_per_block: int,
    dcp_size: int = 1,
    interleave: int = 1,
    row_stride: torch.Tensor | None = None,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the slot of each token's state into out; slot_mapping: [num_tokens] int64, the tokens' own slots."""
    check_backend("compressed_slots", backend, BACKENDS, compiled=_compressed_slots_kernel, device=out.device)
    _check_inputs(query_start_loc, seq_lens, block_tables, row_stride, out)
    _check_sizes(compress_ratio, states_per_block, dcp_size, interleave)
    check_tensor("slot_mapping", slot_mapping, torch.int64, (None,), out.device)
    num_tokens = slot_mapping.numel()
    _check_room(num_tokens, out)
    if backend == "triton":
        sizes = state_constants(compress_ratio, states_per_block, dcp_size, interleave)
        _launch(slot_mapping, query_start_loc, seq_lens, block_tables, row_stride, sizes, out)
        return
    out[num_tokens:].fill_(PAD)
    out[:num_tokens].copy_(
        compressed_slots_reference(
            slot_mapping,
            query_start_loc,
            seq_lens,
            block_tables,
            compress_ratio=compress_ratio,
            states_per_block=states_per_block,
            dcp_size=dcp_size,
            interleave=interleave,
            row_stride=row_stride,
        )
    )


def packed_compressed_slots_reference(
    writes_kv: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    compress_ratio: int,
    states_per_block: int,
    dcp_size: int,
    interleave: int,
    row_stride: torch.Tensor | None = None,
) -> torch.Tensor:
    slot, owner = _state_places(
        writes_kv.numel(),
        query_start_loc,
        seq_lens,
        block_tables,
        row_stride,
        (compress_ratio, states_per_block, dcp_size, interleave),
    )
    return torch.where(writes_kv & (slot >= 0), slot * dcp_size + owner, PAD)


def packed_compressed_slots(
    writes_kv: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    compress_ratio: int,
    states_per_block: int,
    dcp_size: int,
    interleave: int,
    row_stride: torch.Tensor | None = None,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write slot and owner of each token's state into out; writes_kv: [num_tokens] bool, the token writes its KV."""
    check_backend("packed_compressed_slots", backend, BACKENDS, compiled=_compressed_slots_kernel, device=out.device)
    _check_inputs(query_start_loc, seq_lens, block_tables, row_stride, out)
    _check_sizes(compress_ratio, states_per_block, dcp_size, interleave)
    check_tensor("writes_kv", writes_kv, torch.bool, (None,), out.device)
    num_tokens = writes_kv.numel()
    _check_room(num_tokens, out)
    if backend == "triton":
        sizes = state_constants(compress_ratio, states_per_block, dcp_size, interleave)
        _launch(writes_kv, query_start_loc, seq_lens, block_tables, row_stride, sizes, out)
        return
    out[num_tokens:].fill_(PAD)
    out[:num_tokens].copy_(
        packed_compressed_slots_reference(
            writes_kv,
            query_start_loc,
            seq_lens,
            block_tables,
            compress_ratio=compress_ratio,
            states_per_block=states_per_block,
            dcp_size=dcp_size,
            interleave=interleave,
            row_stride=row_stride,
        )
    )


def unpack_compressed_slots_reference(packed: torch.Tensor, *, dcp_size: int, dcp_rank: int) -> torch.Tensor:
    slot = packed // dcp_size
    return torch.where((packed >= 0) & (packed - slot * dcp_size == dcp_rank), slot, PAD)


def unpack_compressed_slots(
    packed: torch.Tensor, *, dcp_size: int, dcp_rank: int, out: torch.Tensor, backend: str = "torch"
) -> None:
    """Write the slots that one DCP rank keeps into out; packed: [n] int64, gathered."""
    check_backend("unpack_compressed_slots", backend, BACKENDS, compiled=_unpack_kernel, device=out.device)
    check_shard(dcp_size, dcp_rank, 1)
    check_tensor("packed", packed, torch.int64, (None,), out.device)
    check_tensor("out", out, torch.int64, (None,), out.device)
    num_packed, num_out = packed.numel(), out.numel()
    _check_room(num_packed, out)
    if backend == "torch":
        out[num_packed:].fill_(PAD)
        out[:num_packed].copy_(unpack_compressed_slots_reference(packed, dcp_size=dcp_size, dcp_rank=dcp_rank))
    elif num_out:
        _unpack_kernel[(triton.cdiv(num_out, BLOCK),)](
            packed, out, dcp_rank, num_packed, num_out, DCP_SIZE=dcp_size, BLOCK=BLOCK, num_warps=NUM_WARPS
        )


def state_constants(compress_ratio: int, states_per_block: int, dcp_size: int, interleave: int) -> dict[str, int]:
    """How kernels are compiled for one kind of compressed cache."""
    return {"RATIO": compress_ratio, "STATES_PER_BLOCK": states_per_block, **shard_constants(dcp_size, interleave)}


def _launch(
    tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    row_stride: torch.Tensor | None,
    sizes: dict[str, int],
    out: torch.Tensor,
) -> None:
    num_rows, num_out = seq_lens.numel(), out.numel()
    if not num_rows:
        out.fill_(PAD)
    elif num_out:
        _compressed_slots_kernel[(triton.cdiv(num_out, BLOCK),)](
            tokens,
            query_start_loc,
            seq_lens,
            seq_lens if row_stride is None else row_stride,  # not read: a None would be a kernel of its own
            block_tables,
            out,
            int(row_stride is not None),
            num_rows,
            block_tables.shape[1],
            block_tables.stride(0),
            tokens.numel(),
            num_out,
            **sizes,
            PACKED=tokens.dtype == torch.bool,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def _state_places(
    num_tokens: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    row_stride: torch.Tensor | None,
    sizes: tuple[int, int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot (PAD: no state) and owner of the state that each token completes, int64."""
    ratio, states_per_block, dcp_size, interleave = sizes
    token = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    if not block_tables.numel():
        return torch.full_like(token, PAD, dtype=torch.int64), torch.zeros_like(token, dtype=torch.int64)
    row = find_rows(query_start_loc, token)
    pos = find_positions(query_start_loc, seq_lens, token, row, row_stride)
    owner, local = split_position(pos.clamp(min=0), dcp_size, interleave)
    state = local // ratio
    column = state // states_per_block
    block = block_tables[row, column.clamp(max=block_tables.shape[1] - 1)].long()
    written = (token < query_start_loc[-1]) & (pos >= 0) & ((pos + 1) % ratio == 0)
    written &= (column < block_tables.shape[1]) & (block > NULL_BLOCK)
    return torch.where(written, block * states_per_block + state % states_per_block, PAD), owner


def _check_inputs(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    row_stride: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    check_rows(query_start_loc, seq_lens, row_stride)
    check_tensor("block_tables", block_tables, torch.int32, (seq_lens.numel(), None), query_start_loc.device)
    check_tensor("out", out, torch.int64, (None,), query_start_loc.device)


def _check_sizes(compress_ratio: int, states_per_block: int, dcp_size: int, interleave: int) -> None:
    check_positive(compress_ratio=compress_ratio, states_per_block=states_per_block)
    check_shard(dcp_size, 0, interleave)
    check_states_whole(compress_ratio, dcp_size, interleave)


def _check_room(num_tokens: int, out: torch.Tensor) -> None:
    if out.numel() < num_tokens:
        raise ConfigError(f"a buffer of {out.numel()} slots for {num_tokens} tokens: size it for the largest step")
