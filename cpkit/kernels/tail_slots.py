"""Slots of the kpool tail: each request owns one circular block of `kpool` rows.  kpool=4, block table 5:

    position    3  4  5  6  7  8
    slot       23 20 21 22 23 20

Only column 0 of the block tables is read; the cache is replicated on every DCP rank. A request without a block (the
null block 0) gets -1. Tokens from num_tokens on are padding and keep their slot_mapping; a token behind the last
boundary belongs to the last row.

slot_mapping, positions: [>= num_tokens] int64; query_start_loc: [num_rows + 1] int32; block_tables: [num_rows, width]
int32; out: int64, as long as slot_mapping, written in full.
"""

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_tensor
from cpkit.kernels.token_to_req import find_rows, rows_of_tokens
from cpkit.planner.slots import NULL_BLOCK, PAD

BLOCK = 256
NUM_WARPS = 4
"""Tokens of one program and its warps."""


def tail_slots_reference(
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    kpool: int,
    num_tokens: int,
) -> torch.Tensor:
    token = torch.arange(num_tokens, dtype=torch.int32, device=slot_mapping.device)
    block = block_tables[:, 0][find_rows(query_start_loc, token)].long()
    pos = positions[:num_tokens]
    slots = torch.where((block > NULL_BLOCK) & (pos >= 0), block * kpool + pos % kpool, PAD)
    return torch.cat([slots, slot_mapping[num_tokens:]])


@triton.jit
def tails_of_positions(pos, row, block_tables, table_stride, KPOOL: tl.constexpr):
    """Tail slot of each position, int64, -1 where it is negative or its row has no block; pos: int64, row: int32."""
    block = tl.load(block_tables + row.to(tl.int64) * table_stride).to(tl.int64)
    return tl.where((block > 0) & (pos >= 0), block * KPOOL + pos % KPOOL, -1)


@triton.jit(
    do_not_specialize=[
        "slot_mapping", "positions", "query_start_loc", "block_tables", "out", "num_rows", "table_stride", "num_tokens",
        "num_out",
    ],
)  # fmt: skip
def _tail_slots_kernel(
    slot_mapping, positions, query_start_loc, block_tables, out,
    num_rows: tl.int32, table_stride: tl.int64, num_tokens: tl.int64, num_out: tl.int64,
    KPOOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = token < num_tokens
    kept = tl.load(slot_mapping + token, mask=(token < num_out) & (token >= num_tokens), other=-1)
    pos = tl.load(positions + token, mask=real, other=-1)
    row = rows_of_tokens(query_start_loc, token, num_rows)
    slot = tails_of_positions(pos, row, block_tables, table_stride, KPOOL)
    tl.store(out + token, tl.where(real, slot, kept), mask=token < num_out)


def tail_slots(
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    kpool: int,
    num_tokens: int,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the tail slot of every token into out."""
    check_backend("tail_slots", backend, BACKENDS, compiled=_tail_slots_kernel, device=out.device)
    device, num_rows = slot_mapping.device, query_start_loc.numel() - 1
    check_positive(kpool=kpool)
    check_tensor("query_start_loc", query_start_loc, torch.int32, (None,), device)
    check_tensor("slot_mapping", slot_mapping, torch.int64, (None,), device)
    check_tensor("positions", positions, torch.int64, (None,), device)
    check_tensor("block_tables", block_tables, torch.int32, (num_rows, None), device)
    check_tensor("out", out, torch.int64, (slot_mapping.numel(),), device)
    if not 0 <= num_tokens <= min(slot_mapping.numel(), positions.numel()):
        raise PlanError(
            f"num_tokens={num_tokens} with {slot_mapping.numel()} slots and {positions.numel()} positions: every token "
            "has both"
        )
    if num_tokens and not block_tables.numel():
        raise PlanError(
            f"{num_tokens} tokens and block_tables of shape {tuple(block_tables.shape)}: every token belongs to a row, "
            "whose tail block is in column 0"
        )
    if not num_tokens:
        out.copy_(slot_mapping)
    elif backend == "torch":
        out.copy_(
            tail_slots_reference(
                slot_mapping, positions, query_start_loc, block_tables, kpool=kpool, num_tokens=num_tokens
            )
        )
    else:
        _tail_slots_kernel[(triton.cdiv(out.numel(), BLOCK),)](
            slot_mapping,
            positions,
            query_start_loc,
            block_tables,
            out,
            num_rows,
            block_tables.stride(0),
            num_tokens,
            out.numel(),
            KPOOL=kpool,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
