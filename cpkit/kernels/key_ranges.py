"""Which keys of the workspace each query token of a prefill chunk may score: key_start .. key_end.

Two layouts, two functions: this rank's own keys, request after request (`key_ranges_local`), or the keys of all ranks
gathered into token order (`key_ranges_gathered`). dcp_size=2, interleave=1, one request of 5 tokens, all of them
queries:

    position            0    1    2    3    4
    gathered          0-1  0-2  0-3  0-4  0-5
    local, rank 0     0-1  0-1  0-2  0-2  0-3       rank 0 holds t0 t2 t4
    local, rank 1     0-0  0-1  0-1  0-2  0-2       rank 1 holds t1 t3

Keys are states of compress_ratio tokens, seen from their last token on. Under a key span [a, b) the workspace holds
only those keys of one request. In the same launch the row of every key of the workspace is written:

    key_start_loc 0 2 2 3    key_rows 0 0 2

Everything is written in full; a token behind the last row gets an empty range.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_rows, check_shard, check_tensor
from cpkit.kernels.dcp_local_lens import dcp_local_lens_reference, local_lens_of, shard_constants
from cpkit.kernels.token_to_req import find_positions, find_rows, positions_of_tokens, rows_of_tokens
from cpkit.planner.interleave import keys_a_turn
from cpkit.planner.state_slots import check_states_whole

Span = tuple[int, int]
WHOLE: Span = (0, 1 << 62)
"""The span of a workspace that holds the keys of whole rows: no row has as many."""
BLOCK = 256
NUM_WARPS = 4
"""Tokens, or keys, of one program, and its warps."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """Rows of a chunk, on the device.

    query_start_loc: [num_rows + 1] int32, in the flat batch; seq_lens: [num_rows] int32. region_start: [num_rows]
    int64, first workspace key of each row. key_start_loc: [num_rows + 1] int32, running key counts; of rows that share
    a request's keys the first counts them. row_stride: [num_rows] int32, positions from one token of a row to the next;
    None: 1.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    region_start: torch.Tensor
    key_start_loc: torch.Tensor
    row_stride: torch.Tensor | None = None


class KeyRanges(NamedTuple):
    """What is written: token i of the ranges is flat token token_start + i.

    int32 is the scoring kernels' contract: the caller checks that the workspace stays below 2^31 keys. key_rows is
    empty where an earlier run of the chunk's query tokens has written it.
    """

    key_start: torch.Tensor  # [num_tokens] int32
    key_end: torch.Tensor  # [num_tokens] int32
    key_rows: torch.Tensor  # [num_keys] int32, row of the chunk


def key_ranges_gathered_reference(
    rows: ChunkRows, num_tokens: int, num_keys: int, *, token_start: int, compress_ratio: int, span: Span = WHOLE
) -> KeyRanges:
    row, seen = _seen_keys(rows, num_tokens, token_start, compress_ratio)
    start = rows.region_start[row]
    return KeyRanges(start.int(), (start + seen.clamp(*span) - span[0]).int(), _key_rows(rows, num_keys))


def key_ranges_local_reference(
    rows: ChunkRows,
    num_tokens: int,
    num_keys: int,
    *,
    token_start: int,
    compress_ratio: int,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    span: Span = WHOLE,
) -> KeyRanges:
    row, seen = _seen_keys(rows, num_tokens, token_start, compress_ratio)
    shard = {
        "dcp_size": dcp_size,
        "dcp_rank": dcp_rank,
        "interleave": keys_a_turn(interleave, compress_ratio, dcp_size),
    }
    before = dcp_local_lens_reference(torch.full_like(seen, span[0]), **shard)
    num_held = dcp_local_lens_reference(seen.clamp(*span), **shard) - before
    start = rows.region_start[row]
    return KeyRanges(start.int(), (start + num_held).int(), _key_rows(rows, num_keys))


def _seen_keys(
    rows: ChunkRows, num_tokens: int, token_start: int, compress_ratio: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each token and the keys of its request that it may score, int64."""
    loc = rows.query_start_loc
    token = torch.arange(token_start, token_start + num_tokens, dtype=torch.int32, device=loc.device)
    row = find_rows(loc, token)
    pos = find_positions(loc, rows.seq_lens, token, row, rows.row_stride)
    seen = (pos.clamp(min=-1) + 1) // compress_ratio
    return row, torch.where(token < loc[-1], seen, 0)


def _key_rows(rows: ChunkRows, num_keys: int) -> torch.Tensor:
    key = torch.arange(num_keys, dtype=torch.int32, device=rows.key_start_loc.device)
    return find_rows(rows.key_start_loc, key).int()


@triton.jit(
    do_not_specialize=[
        "query_start_loc", "seq_lens", "row_stride", "region_start", "key_start_loc", "key_start", "key_end",
        "key_rows", "strided", "num_rows", "token_start", "num_tokens", "num_keys", "span_start", "span_stop",
        "dcp_rank",
    ]
)  # fmt: skip
def _key_ranges_kernel(
    query_start_loc, seq_lens, row_stride, region_start, key_start_loc, key_start, key_end, key_rows,
    strided: tl.int32, num_rows: tl.int32, token_start: tl.int32, num_tokens: tl.int32, num_keys: tl.int32,
    span_start: tl.int64, span_stop: tl.int64, dcp_rank: tl.int64,
    RATIO: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs take tokens, the others keys. INTERLEAVE counts keys."""
    token_blocks = tl.cdiv(num_tokens, BLOCK)
    if tl.program_id(0) < token_blocks:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        token = token_start + i
        row = rows_of_tokens(query_start_loc, token, num_rows)
        pos = positions_of_tokens(query_start_loc, seq_lens, row_stride, token, row, strided)
        seen = (tl.maximum(pos, -1) + 1) // RATIO
        seen = tl.where(token < tl.load(query_start_loc + num_rows), seen, 0)
        seen = tl.minimum(tl.maximum(seen, span_start), span_stop)
        before = local_lens_of(span_start, dcp_rank, DCP_SIZE, INTERLEAVE)
        held = local_lens_of(seen, dcp_rank, DCP_SIZE, INTERLEAVE) - before
        start = tl.load(region_start + row)
        tl.store(key_start + i, start.to(tl.int32), mask=i < num_tokens)
        tl.store(key_end + i, (start + held).to(tl.int32), mask=i < num_tokens)
    else:
        key = (tl.program_id(0) - token_blocks) * BLOCK + tl.arange(0, BLOCK)
        tl.store(key_rows + key, rows_of_tokens(key_start_loc, key, num_rows), mask=key < num_keys)


def key_ranges_gathered(
    rows: ChunkRows,
    *,
    token_start: int,
    compress_ratio: int,
    span: Span = WHOLE,
    out: KeyRanges,
    backend: str = "torch",
) -> None:
    """Write the ranges in the gathered layout."""
    _check("key_ranges_gathered", rows, compress_ratio, out, backend)
    if backend == "torch":
        values = key_ranges_gathered_reference(
            rows,
            out.key_start.numel(),
            out.key_rows.numel(),
            token_start=token_start,
            compress_ratio=compress_ratio,
            span=span,
        )
        _store(values, out)
    else:
        _launch(rows, out, token_start, span, 0, range_constants(compress_ratio))


def key_ranges_local(
    rows: ChunkRows,
    *,
    token_start: int,
    compress_ratio: int,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    span: Span = WHOLE,
    out: KeyRanges,
    backend: str = "torch",
) -> None:
    """Write the ranges in one rank's own keys; interleave in tokens, span in keys of the whole request."""
    check_shard(dcp_size, dcp_rank, interleave)
    check_positive(compress_ratio=compress_ratio)
    check_states_whole(compress_ratio, dcp_size, interleave)
    _check("key_ranges_local", rows, compress_ratio, out, backend)
    if backend == "torch":
        values = key_ranges_local_reference(
            rows,
            out.key_start.numel(),
            out.key_rows.numel(),
            token_start=token_start,
            compress_ratio=compress_ratio,
            dcp_size=dcp_size,
            dcp_rank=dcp_rank,
            interleave=interleave,
            span=span,
        )
        _store(values, out)
    else:
        _launch(rows, out, token_start, span, dcp_rank, range_constants(compress_ratio, dcp_size, interleave))


def _store(values: KeyRanges, out: KeyRanges) -> None:
    for value, buffer in zip(values, out, strict=True):
        buffer.copy_(value)


def range_constants(compress_ratio: int, dcp_size: int = 1, interleave: int = 1) -> dict[str, int]:
    """How the kernel is compiled for a layout; interleave in tokens, dcp_size=1 for gathered keys."""
    return {"RATIO": compress_ratio, **shard_constants(dcp_size, keys_a_turn(interleave, compress_ratio, dcp_size))}


def _launch(
    rows: ChunkRows, out: KeyRanges, token_start: int, span: Span, dcp_rank: int, constants: dict[str, int]
) -> None:
    num_rows, num_tokens, num_keys = rows.seq_lens.numel(), out.key_start.numel(), out.key_rows.numel()
    programs = triton.cdiv(num_tokens, BLOCK) + triton.cdiv(num_keys, BLOCK)
    if not programs:
        return
    strided = int(rows.row_stride is not None)
    _key_ranges_kernel[(programs,)](
        rows.query_start_loc,
        rows.seq_lens,
        rows.row_stride if strided else rows.seq_lens,  # not read: a None would make a second kernel
        rows.region_start,
        rows.key_start_loc,
        *out,
        strided,
        num_rows,
        token_start,
        num_tokens,
        num_keys,
        *span,
        dcp_rank,
        **constants,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def _check(kernel: str, rows: ChunkRows, compress_ratio: int, out: KeyRanges, backend: str) -> None:
    device, num_rows = rows.query_start_loc.device, rows.seq_lens.numel()
    check_backend(kernel, backend, BACKENDS, compiled=_key_ranges_kernel, device=device)
    check_positive(compress_ratio=compress_ratio, num_rows=num_rows)
    check_rows(rows.query_start_loc, rows.seq_lens, rows.row_stride)
    check_tensor("region_start", rows.region_start, torch.int64, (num_rows,), device)
    check_tensor("key_start_loc", rows.key_start_loc, torch.int32, (num_rows + 1,), device)
    check_tensor("key_start", out.key_start, torch.int32, (None,), device)
    check_tensor("key_end", out.key_end, torch.int32, (out.key_start.numel(),), device)
    check_tensor("key_rows", out.key_rows, torch.int32, (None,), device)
