"""All slots of a step in one launch: of the tokens, of the states that they complete, and of the kpool tail.

What an engine needs before it has a slot_mapping: slots from the rows of the batch and their block tables alone.
dcp_size=1, block_size=2, compress_ratio=2, states_per_block=2, kpool=4; block tables 7 8 9 (tokens), 3 4 (states) and
5 (tail); one request of 5 tokens, the first of which is not written (another rank writes it), and one of padding:

    position             0  1  2  3  4  -
    slot of the token    - 15 16 17 18  -
    slot of the state    -  6  -  7  -  -     3 * 2 + 0, 3 * 2 + 1: beside the state's last token
    slot in the tail    20 21 22 23 20  -     every rank keeps the tail, whoever writes the token

writes_kv: [num_tokens] bool, this rank's copy of the token writes its KV; None: all do. Block tables: [num_rows, width]
int32. Each out: int64, of one length of at least num_tokens, -1 where nothing is written, behind the last token in
full.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_tensor
from cpkit.kernels.compressed_slots import StateBlocks, compressed_slots_reference, slots_of_positions
from cpkit.kernels.dcp_local_lens import shard_constants
from cpkit.kernels.tail_slots import tail_slots_reference, tails_of_positions
from cpkit.kernels.token_to_req import BatchRows, find_positions, find_rows, positions_of_tokens, rows_of_tokens
from cpkit.planner.slots import PAD
from cpkit.topology import Shard

BLOCK = 256
NUM_WARPS = 4
"""Tokens of one program and its warps."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSlots:
    """Where the slots of the tokens go. block_size: tokens of one block; the shard's rank stores what it owns."""

    block_tables: torch.Tensor
    out: torch.Tensor
    block_size: int
    shard: Shard


@dataclass(frozen=True, slots=True, eq=False)
class StateSlots:
    """Where the slots of the states go: of the tokens that this rank writes, sharded as they are."""

    blocks: StateBlocks
    out: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TailSlots:
    """Where the slots in the kpool tail go; only column 0 of the block tables is read."""

    block_tables: torch.Tensor
    out: torch.Tensor
    kpool: int


def step_slots_reference(
    rows: BatchRows,
    token: TokenSlots,
    states: StateSlots | None = None,
    tail: TailSlots | None = None,
    *,
    writes_kv: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The slots of each kind that is wanted, in the order of the arguments."""
    loc, shard, num_out = rows.query_start_loc, token.shard, token.out.numel()
    index = torch.arange(num_out, dtype=torch.int32, device=loc.device)
    if rows.num_rows:
        pos = find_positions(loc, rows.seq_lens, index, find_rows(loc, index), rows.row_stride)
        pos = torch.where(index < loc[-1], pos, PAD)
    else:
        pos = torch.full_like(index, PAD, dtype=torch.int64)
    here = torch.full_like(pos, 0 if writes_kv is None else PAD)
    if writes_kv is not None:
        here[: len(writes_kv)].masked_fill_(writes_kv, 0)
    here.masked_fill_(pos.clamp(min=0) // shard.interleave % shard.dcp_size != shard.dcp_rank, PAD)
    blocks = StateBlocks(token.block_tables, 1, token.block_size)  # a token is a state of its own
    slots = [compressed_slots_reference(here, rows, blocks, shard)]
    if states is not None:
        slots.append(compressed_slots_reference(slots[0], rows, states.blocks, shard))
    if tail is not None:
        none = torch.full_like(pos, PAD)
        mapped = num_out if rows.num_rows else 0
        slots.append(tail_slots_reference(none, pos, loc, tail.block_tables, kpool=tail.kpool, num_tokens=mapped))
    return slots


@triton.jit(
    do_not_specialize=[
        "query_start_loc", "seq_lens", "row_stride", "writes_kv", "token_tables", "state_tables", "tail_tables",
        "token_out", "state_out", "tail_out", "strided", "masked", "num_rows", "token_width", "state_width", "dcp_rank",
        "token_stride", "state_stride", "tail_stride", "num_written", "num_out",
    ],
)  # fmt: skip
def _step_slots_kernel(
    query_start_loc, seq_lens, row_stride, writes_kv, token_tables, state_tables, tail_tables,
    token_out, state_out, tail_out,
    strided: tl.int32, masked: tl.int32, num_rows: tl.int32, token_width: tl.int32, state_width: tl.int32,
    dcp_rank: tl.int64,
    token_stride: tl.int64, state_stride: tl.int64, tail_stride: tl.int64, num_written: tl.int64, num_out: tl.int64,
    BLOCK_SIZE: tl.constexpr, RATIO: tl.constexpr, STATES_PER_BLOCK: tl.constexpr, KPOOL: tl.constexpr,
    DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RATIO, KPOOL: 0 where no states, no tail are wanted. num_written: entries of writes_kv, or of out."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_step = token < tl.load(query_start_loc + num_rows)
    row = rows_of_tokens(query_start_loc, token, num_rows)
    pos = positions_of_tokens(query_start_loc, seq_lens, row_stride, token, row, strided)
    written = in_step & (token < num_written)
    if masked != 0:
        written = written & (tl.load(writes_kv + token, mask=written, other=0) != 0)
    slot, owner = slots_of_positions(
        pos, row, written, token_tables, token_width, token_stride, 1, BLOCK_SIZE, DCP_SIZE, INTERLEAVE
    )
    slot = tl.where(owner == dcp_rank, slot, -1)
    tl.store(token_out + token, slot, mask=token < num_out)
    if RATIO > 0:
        state, _ = slots_of_positions(
            pos, row, slot >= 0, state_tables, state_width, state_stride, RATIO, STATES_PER_BLOCK, DCP_SIZE, INTERLEAVE
        )
        tl.store(state_out + token, state, mask=token < num_out)
    if KPOOL > 0:
        tail = tails_of_positions(pos, row, tail_tables, tail_stride, KPOOL)
        tl.store(tail_out + token, tl.where(in_step, tail, -1), mask=token < num_out)


def step_slots(
    rows: BatchRows,
    token: TokenSlots,
    states: StateSlots | None = None,
    tail: TailSlots | None = None,
    *,
    writes_kv: torch.Tensor | None = None,
    backend: str = "torch",
) -> None:
    """Write the slots of each kind that is wanted into its out."""
    loc, num_rows, num_out = rows.query_start_loc, rows.num_rows, token.out.numel()
    check_backend("step_slots", backend, BACKENDS, compiled=_step_slots_kernel, device=loc.device)
    _check(rows, token, states, tail, writes_kv)
    if backend == "torch" or not num_rows:
        wanted = [kind.out for kind in (token, states, tail) if kind is not None]
        for out, slots in zip(
            wanted, step_slots_reference(rows, token, states, tail, writes_kv=writes_kv), strict=True
        ):
            out.copy_(slots)
    elif num_out:
        # pointers that the kernel does not read stand where an argument is None: None would be a kernel of its own
        state_tables, state_out = (
            (states.blocks.block_tables, states.out) if states else (token.block_tables, token.out)
        )
        tail_tables, tail_out = (tail.block_tables, tail.out) if tail else (token.block_tables, token.out)
        _step_slots_kernel[(triton.cdiv(num_out, BLOCK),)](
            loc,
            rows.seq_lens,
            rows.seq_lens if rows.row_stride is None else rows.row_stride,
            rows.seq_lens.view(torch.bool) if writes_kv is None else writes_kv,
            token.block_tables,
            state_tables,
            tail_tables,
            token.out,
            state_out,
            tail_out,
            int(rows.row_stride is not None),
            int(writes_kv is not None),
            num_rows,
            token.block_tables.shape[1],
            state_tables.shape[1],
            token.shard.dcp_rank,
            token.block_tables.stride(0),
            state_tables.stride(0),
            tail_tables.stride(0),
            num_out if writes_kv is None else writes_kv.numel(),
            num_out,
            **_constants(token, states, tail),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def _constants(token: TokenSlots, states: StateSlots | None, tail: TailSlots | None) -> dict[str, int]:
    ratio, per_block = (states.blocks.compress_ratio, states.blocks.states_per_block) if states else (0, 1)
    kpool, shard = tail.kpool if tail else 0, token.shard
    return step_constants(token.block_size, ratio, per_block, kpool, shard.dcp_size, shard.interleave)


def step_constants(
    block_size: int, compress_ratio: int, states_per_block: int, kpool: int, dcp_size: int, interleave: int
) -> dict[str, int]:
    """How the kernel is compiled; compress_ratio, kpool: 0 where no states, no tail are wanted."""
    sizes = {"RATIO": compress_ratio, "STATES_PER_BLOCK": states_per_block, "KPOOL": kpool}
    return {"BLOCK_SIZE": block_size, **sizes, **shard_constants(dcp_size, interleave)}


def _check(
    rows: BatchRows,
    token: TokenSlots,
    states: StateSlots | None,
    tail: TailSlots | None,
    writes_kv: torch.Tensor | None,
) -> None:
    rows.check()
    num_rows, device = rows.num_rows, rows.query_start_loc.device
    check_positive(block_size=token.block_size)
    check_tensor("token.block_tables", token.block_tables, torch.int32, (num_rows, None), device)
    for name, kind in (("token", token), ("states", states), ("tail", tail)):
        if kind is not None:
            check_tensor(f"{name}.out", kind.out, torch.int64, (token.out.numel(),), device)
    if states is not None:
        states.blocks.check("states.block_tables", num_rows, token.shard, device)
    if tail is not None:
        check_positive(kpool=tail.kpool)
        check_tensor("tail.block_tables", tail.block_tables, torch.int32, (num_rows, None), device)
        if num_rows and not tail.block_tables.shape[1]:
            raise PlanError(f"tail.block_tables [{num_rows}, 0]: the tail block of a row is in column 0")
    if writes_kv is not None:
        check_tensor("writes_kv", writes_kv, torch.bool, (None,), device)
        if writes_kv.numel() > token.out.numel():
            raise PlanError(f"writes_kv of {writes_kv.numel()} tokens and slots for {token.out.numel()}")
