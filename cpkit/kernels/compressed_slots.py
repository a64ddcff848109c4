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

shard: interleave in tokens. out: int64, reset to -1 in full, tail included. A state in the null block 0, behind the
block table or at a negative position is not written.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cpkit.errors import ConfigError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_tensor
from cpkit.kernels.dcp_local_lens import owners_of_positions, shard_constants, split_position
from cpkit.kernels.token_to_req import BatchRows, find_positions, find_rows, positions_of_tokens, rows_of_tokens
from cpkit.planner.slots import NULL_BLOCK, PAD
from cpkit.planner.state_slots import check_states_whole
from cpkit.topology import Shard

BLOCK = 256
NUM_WARPS = 4
"""Tokens of one program and its warps."""


@dataclass(frozen=True, slots=True, eq=False)
class StateBlocks:
    """Where a compressed cache keeps the states of each row.

    block_tables: [num_rows, width] int32, of blocks of states_per_block states, each made from compress_ratio tokens.
    """

    block_tables: torch.Tensor
    compress_ratio: int
    states_per_block: int

    def check(self, name: str, num_rows: int, shard: Shard, device: torch.device) -> None:
        """Raise PlanError unless they are those of a batch's rows, ConfigError where a state would span two ranks."""
        check_tensor(name, self.block_tables, torch.int32, (num_rows, None), device)
        check_positive(compress_ratio=self.compress_ratio, states_per_block=self.states_per_block)
        check_states_whole(self.compress_ratio, shard.dcp_size, shard.interleave)


def compressed_slots_reference(
    slot_mapping: torch.Tensor, rows: BatchRows, states: StateBlocks, shard: Shard
) -> torch.Tensor:
    slot, _ = _state_places(slot_mapping.numel(), rows, states, shard)
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
    rows: BatchRows,
    states: StateBlocks,
    shard: Shard,
    *,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the slot of each token's state into out; slot_mapping: [num_tokens] int64, the tokens' own slots."""
    check_backend("compressed_slots", backend, BACKENDS, compiled=_compressed_slots_kernel, device=out.device)
    check_tensor("slot_mapping", slot_mapping, torch.int64, (None,), out.device)
    _check(slot_mapping.numel(), rows, states, shard, out)
    if backend == "triton":
        _launch(slot_mapping, rows, states, shard, out)
    else:
        _store(compressed_slots_reference(slot_mapping, rows, states, shard), out)


def packed_compressed_slots_reference(
    writes_kv: torch.Tensor, rows: BatchRows, states: StateBlocks, shard: Shard
) -> torch.Tensor:
    slot, owner = _state_places(writes_kv.numel(), rows, states, shard)
    return torch.where(writes_kv & (slot >= 0), slot * shard.dcp_size + owner, PAD)


def packed_compressed_slots(
    writes_kv: torch.Tensor,
    rows: BatchRows,
    states: StateBlocks,
    shard: Shard,
    *,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write slot and owner of each token's state into out; writes_kv: [num_tokens] bool, the token writes its KV."""
    check_backend("packed_compressed_slots", backend, BACKENDS, compiled=_compressed_slots_kernel, device=out.device)
    check_tensor("writes_kv", writes_kv, torch.bool, (None,), out.device)
    _check(writes_kv.numel(), rows, states, shard, out)
    if backend == "triton":
        _launch(writes_kv, rows, states, shard, out)
    else:
        _store(packed_compressed_slots_reference(writes_kv, rows, states, shard), out)


def unpack_compressed_slots_reference(packed: torch.Tensor, shard: Shard) -> torch.Tensor:
    slot = packed // shard.dcp_size
    return torch.where((packed >= 0) & (packed - slot * shard.dcp_size == shard.dcp_rank), slot, PAD)


def unpack_compressed_slots(packed: torch.Tensor, shard: Shard, *, out: torch.Tensor, backend: str = "torch") -> None:
    """Write the slots that one DCP rank keeps into out; packed: [n] int64, gathered."""
    check_backend("unpack_compressed_slots", backend, BACKENDS, compiled=_unpack_kernel, device=out.device)
    check_tensor("packed", packed, torch.int64, (None,), out.device)
    check_tensor("out", out, torch.int64, (None,), out.device)
    num_packed, num_out = packed.numel(), out.numel()
    _check_room(num_packed, out)
    if backend == "torch":
        _store(unpack_compressed_slots_reference(packed, shard), out)
    elif num_out:
        _unpack_kernel[(triton.cdiv(num_out, BLOCK),)](
            packed, out, shard.dcp_rank, num_packed, num_out, DCP_SIZE=shard.dcp_size, BLOCK=BLOCK, num_warps=NUM_WARPS
        )


def state_constants(compress_ratio: int, states_per_block: int, dcp_size: int, interleave: int) -> dict[str, int]:
    """How kernels are compiled for one kind of compressed cache."""
    return {"RATIO": compress_ratio, "STATES_PER_BLOCK": states_per_block, **shard_constants(dcp_size, interleave)}


def _launch(tokens: torch.Tensor, rows: BatchRows, states: StateBlocks, shard: Shard, out: torch.Tensor) -> None:
    num_out = out.numel()
    if not rows.num_rows:
        out.fill_(PAD)
    elif num_out:
        _compressed_slots_kernel[(triton.cdiv(num_out, BLOCK),)](
            tokens,
            rows.query_start_loc,
            rows.seq_lens,
            rows.seq_lens if rows.row_stride is None else rows.row_stride,  # not read: a None would be another kernel
            states.block_tables,
            out,
            int(rows.row_stride is not None),
            rows.num_rows,
            states.block_tables.shape[1],
            states.block_tables.stride(0),
            tokens.numel(),
            num_out,
            **state_constants(states.compress_ratio, states.states_per_block, shard.dcp_size, shard.interleave),
            PACKED=tokens.dtype == torch.bool,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def _store(slots: torch.Tensor, out: torch.Tensor) -> None:
    out[len(slots) :].fill_(PAD)
    out[: len(slots)].copy_(slots)


def _state_places(
    num_tokens: int, rows: BatchRows, states: StateBlocks, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot (PAD: no state) and owner of the state that each token completes, int64."""
    block_tables, ratio, per_block = states.block_tables, states.compress_ratio, states.states_per_block
    token = torch.arange(num_tokens, dtype=torch.int32, device=block_tables.device)
    if not block_tables.numel():
        return torch.full_like(token, PAD, dtype=torch.int64), torch.zeros_like(token, dtype=torch.int64)
    row = find_rows(rows.query_start_loc, token)
    pos = find_positions(rows.query_start_loc, rows.seq_lens, token, row, rows.row_stride)
    owner, local = split_position(pos.clamp(min=0), shard.dcp_size, shard.interleave)
    state = local // ratio
    column = state // per_block
    block = block_tables[row, column.clamp(max=block_tables.shape[1] - 1)].long()
    written = (token < rows.query_start_loc[-1]) & (pos >= 0) & ((pos + 1) % ratio == 0)
    written &= (column < block_tables.shape[1]) & (block > NULL_BLOCK)
    return torch.where(written, block * per_block + state % per_block, PAD), owner


def _check(num_tokens: int, rows: BatchRows, states: StateBlocks, shard: Shard, out: torch.Tensor) -> None:
    rows.check()
    states.check("block_tables", rows.num_rows, shard, rows.query_start_loc.device)
    check_tensor("out", out, torch.int64, (None,), rows.query_start_loc.device)
    _check_room(num_tokens, out)


def _check_room(num_tokens: int, out: torch.Tensor) -> None:
    if out.numel() < num_tokens:
        raise ConfigError(f"a buffer of {out.numel()} slots for {num_tokens} tokens: size it for the largest step")
