"""Decode rows: the keys each query token of a decode sees, expanded first, then localised, then divided by the ratio.

A request with context L and n query tokens this step shows its token j the first L - n + 1 + j positions, never below
0. Contexts 9 4, query lengths 3 1, room for 6 rows:

    flat      seq_lens   7 8 9 4 0 0        one row per query token: every token length 1, padding rows too
              req        0 0 0 1 2 3        padding rows count on from the number of requests
    native    seq_lens   7 8 9              one row per request, query tokens packed from the left
                         4 0 0
              query_lens 3 1

dcp_size=2, rank 1, interleave=1: contexts 8 9 10 become 4 4 5. A request localised first and counted down per token
would give 3 4 5. The block table row of a padding row, and of a request without query tokens, is zero in full.

query_start_loc: [num_reqs + 1], seq_lens: [num_reqs] int32, of the decodes alone, lengths in tokens; block_tables:
[num_reqs, width] int32. shard: interleave in tokens. Nothing is read on the host, so captured graphs follow lengths
that change on the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_rows, check_tensor
from cpkit.kernels.dcp_local_lens import dcp_local_lens_reference, local_lens_of, shard_constants
from cpkit.kernels.token_to_req import rows_of_tokens
from cpkit.planner.state_slots import check_states_whole
from cpkit.topology import Shard

ROWS, COLUMNS, NUM_WARPS = 4, 256, 4
"""Rows of one program, table entries of each, and its warps."""


class DecodeRows(NamedTuple):
    """Rows as the kernels take them; every field has the same leading size. Views of fixed-address buffers."""

    seq_lens: torch.Tensor  # [num_rows, width] int32, keys of this rank that each query token sees
    global_seq_lens: torch.Tensor  # [num_rows] int32, keys of all ranks that the row's last query token sees
    query_lens: torch.Tensor  # [num_rows] int32, query tokens of the row
    req: torch.Tensor  # [num_rows] int32, request of the row
    block_tables: torch.Tensor  # [num_rows, table width] int32


def flat_decodes_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    shard: Shard,
    num_rows: int,
    *,
    compress_ratio: int = 1,
) -> DecodeRows:
    num_reqs = seq_lens.numel()
    token = torch.arange(num_rows, dtype=torch.int32, device=seq_lens.device)
    found = torch.searchsorted(query_start_loc[1:].contiguous(), token, right=True)
    real, row = found < num_reqs, found.clamp(max=num_reqs - 1)
    lens = torch.where(real, (seq_lens[row] - query_start_loc[row + 1] + token + 1).clamp(min=0), 0)
    local = _local_lens(lens, shard)
    return DecodeRows(
        seq_lens=(local // compress_ratio)[:, None].int(),
        global_seq_lens=(lens // compress_ratio).int(),
        query_lens=torch.ones_like(token),
        req=torch.where(real, row, num_reqs + token - query_start_loc[-1]).int(),
        block_tables=torch.where(real[:, None], block_tables[row], 0),
    )


@triton.jit(
    do_not_specialize=[
        "query_start_loc", "seq_lens", "block_tables", "row_lens", "global_lens", "query_lens", "row_req",
        "row_tables", "num_reqs", "num_rows", "width", "table_width", "table_stride", "lens_stride",
        "row_table_stride", "dcp_rank",
    ]
)  # fmt: skip
def _decode_rows_kernel(
    query_start_loc, seq_lens, block_tables, row_lens, global_lens, query_lens, row_req, row_tables,
    num_reqs: tl.int32, num_rows: tl.int32, width: tl.int32, table_width: tl.int32, table_stride: tl.int64,
    lens_stride: tl.int64, row_table_stride: tl.int64, dcp_rank: tl.int64,
    RATIO: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS rows and COLUMNS of their table entries; programs of the first columns write all else of the rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    if FLAT:
        num_tokens = tl.load(query_start_loc + num_reqs)
        req = rows_of_tokens(query_start_loc, row, num_reqs)
        num_queries = (row < num_tokens).to(tl.int32)
        first_len = tl.load(seq_lens + req) - tl.load(query_start_loc + req + 1) + row + 1
        named_req = tl.where(row < num_tokens, req, num_reqs + row - num_tokens)
    else:
        req = tl.minimum(row, num_reqs - 1)
        num_queries = tl.load(query_start_loc + req + 1) - tl.load(query_start_loc + req)
        num_queries = tl.where(row < num_reqs, num_queries, 0)
        first_len = tl.load(seq_lens + req) - num_queries + 1
        named_req = row
    if tl.program_id(1) == 0:
        if FLAT:
            last_len = tl.maximum(first_len, 0)
            tl.store(query_lens + row, 1, mask=inside)
        else:
            last_len = tl.load(seq_lens + req)
            tl.store(query_lens + row, num_queries, mask=inside)
        tl.store(global_lens + row, tl.where(num_queries > 0, last_len // RATIO, 0), mask=inside)
        tl.store(row_req + row, named_req, mask=inside)
        for token in range(width):
            lens = tl.where(token < num_queries, tl.maximum(first_len + token, 0), 0)
            local = local_lens_of(lens, dcp_rank, DCP_SIZE, INTERLEAVE) // RATIO
            tl.store(row_lens + row.to(tl.int64) * lens_stride + token, local.to(tl.int32), mask=inside)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    copied = inside[:, None] & (column < table_width)[None, :]
    read = copied & (num_queries > 0)[:, None]
    block = tl.load(block_tables + req.to(tl.int64)[:, None] * table_stride + column[None, :], mask=read, other=0)
    tl.store(row_tables + row.to(tl.int64)[:, None] * row_table_stride + column[None, :], block, mask=copied)


def flat_decodes(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    shard: Shard,
    *,
    compress_ratio: int = 1,
    out: DecodeRows,
    backend: str = "torch",
) -> None:
    """Write one row per query token, and padding rows up to the rows of out."""
    check_backend("flat_decodes", backend, BACKENDS, compiled=_decode_rows_kernel, device=seq_lens.device)
    decodes = (query_start_loc, seq_lens, block_tables)
    _check(*decodes, shard, compress_ratio, out)
    check_tensor("out.seq_lens", out.seq_lens, torch.int32, (None, 1), seq_lens.device)
    if backend == "triton":
        _launch(*decodes, shard, compress_ratio, out, flat=True)
    else:
        rows = flat_decodes_reference(*decodes, shard, out.req.numel(), compress_ratio=compress_ratio)
        _store(rows, out)


def native_decodes_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    shard: Shard,
    num_rows: int,
    width: int,
    *,
    compress_ratio: int = 1,
) -> DecodeRows:
    num_reqs = seq_lens.numel()
    row = torch.arange(num_rows, dtype=torch.int32, device=seq_lens.device)
    req = row.clamp(max=num_reqs - 1)
    query_lens = torch.where(row < num_reqs, query_start_loc[req + 1] - query_start_loc[req], 0)
    token = torch.arange(width, dtype=torch.int32, device=seq_lens.device)
    first = seq_lens[req] - query_lens + 1
    lens = torch.where(token < query_lens[:, None], (first[:, None] + token).clamp(min=0), 0)
    local = _local_lens(lens, shard)
    return DecodeRows(
        seq_lens=local // compress_ratio,
        global_seq_lens=torch.where(query_lens > 0, seq_lens[req] // compress_ratio, 0),
        query_lens=query_lens,
        req=row,
        block_tables=torch.where(query_lens[:, None] > 0, block_tables[req], 0),
    )


def native_decodes(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    shard: Shard,
    *,
    compress_ratio: int = 1,
    out: DecodeRows,
    backend: str = "torch",
) -> None:
    """Write one row per request, and padding rows up to the rows of out, as wide as the longest query."""
    check_backend("native_decodes", backend, BACKENDS, compiled=_decode_rows_kernel, device=seq_lens.device)
    decodes = (query_start_loc, seq_lens, block_tables)
    _check(*decodes, shard, compress_ratio, out)
    if backend == "triton":
        _launch(*decodes, shard, compress_ratio, out, flat=False)
    else:
        rows = native_decodes_reference(*decodes, shard, *out.seq_lens.shape, compress_ratio=compress_ratio)
        _store(rows, out)


def decode_constants(compress_ratio: int, dcp_size: int, interleave: int) -> dict[str, int]:
    """How the kernel is compiled for a cache; interleave in tokens."""
    return {"RATIO": compress_ratio, **shard_constants(dcp_size, interleave)}


def _local_lens(lens: torch.Tensor, shard: Shard) -> torch.Tensor:
    return dcp_local_lens_reference(lens, dcp_size=shard.dcp_size, dcp_rank=shard.dcp_rank, interleave=shard.interleave)


def _launch(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    shard: Shard,
    compress_ratio: int,
    out: DecodeRows,
    *,
    flat: bool,
) -> None:
    num_rows, table_width = out.block_tables.shape
    if not num_rows:
        return
    _decode_rows_kernel[(triton.cdiv(num_rows, ROWS), max(triton.cdiv(table_width, COLUMNS), 1))](
        query_start_loc,
        seq_lens,
        block_tables,
        *out,
        seq_lens.numel(),
        num_rows,
        out.seq_lens.shape[1],
        table_width,
        block_tables.stride(0),
        out.seq_lens.stride(0),
        out.block_tables.stride(0),
        shard.dcp_rank,
        **decode_constants(compress_ratio, shard.dcp_size, shard.interleave),
        FLAT=flat,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )


def _store(rows: DecodeRows, out: DecodeRows) -> None:
    for values, buffer in zip(rows, out, strict=True):
        buffer.copy_(values)


def _check(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    shard: Shard,
    compress_ratio: int,
    out: DecodeRows,
) -> None:
    device, num_rows = seq_lens.device, out.req.numel()
    check_positive(compress_ratio=compress_ratio)
    check_states_whole(compress_ratio, shard.dcp_size, shard.interleave)
    check_rows(query_start_loc, seq_lens, None)
    check_positive(num_reqs=seq_lens.numel())
    check_tensor("block_tables", block_tables, torch.int32, (seq_lens.numel(), None), device)
    check_tensor("out.seq_lens", out.seq_lens, torch.int32, (num_rows, None), device)
    for name in ("global_seq_lens", "query_lens", "req"):
        check_tensor(f"out.{name}", getattr(out, name), torch.int32, (num_rows,), device)
    check_tensor("out.block_tables", out.block_tables, torch.int32, (num_rows, block_tables.shape[1]), device)
