"""Which keys of the workspace each query token of a prefill chunk may score: key_start .. key_end.

Two layouts, two functions: this rank's own keys, request after request (`key_ranges_local`), or the keys of all ranks
gathered into token order (`key_ranges_gathered`). dcp_size=2, interleave=1, one request of 5 tokens, all of them
queries:

    position            0    1    2    3    4
    gathered          0-1  0-2  0-3  0-4  0-5
    local, rank 0     0-1  0-1  0-2  0-2  0-3       rank 0 holds t0 t2 t4
    local, rank 1     0-0  0-1  0-1  0-2  0-2       rank 1 holds t1 t3

Keys are states of compress_ratio tokens, seen from their last token on. Under a key span [a, b) the workspace holds
only those keys of one request.  `key_rows`: the chunk row of every key of the workspace.

query_start_loc: [num_rows + 1] int32, of the chunk's rows, in the flat batch; seq_lens, row_stride: [num_rows] int32;
region_start: [num_rows] int64, first workspace key of each row. Token i of the result is flat token token_start + i.
key_start, key_end: [num_tokens] int32 (the scoring kernels' contract: the caller checks that the workspace stays below
2^31 keys), written in full; a token behind the last row gets an empty range.
"""

import torch

from cpkit.kernels.checks import check_positive, check_rows, check_shard, check_tensor
from cpkit.kernels.dcp_local_lens import dcp_local_lens_reference
from cpkit.kernels.token_to_req import find_positions, find_rows
from cpkit.planner.interleave import keys_a_turn
from cpkit.planner.state_slots import check_states_whole

Span = tuple[int, int]


def key_ranges_gathered_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    region_start: torch.Tensor,
    num_tokens: int,
    *,
    token_start: int,
    compress_ratio: int,
    span: Span | None = None,
    row_stride: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    row, seen = _seen_keys(query_start_loc, seq_lens, row_stride, num_tokens, token_start, compress_ratio)
    if span is not None:
        seen = seen.clamp(*span) - span[0]
    start = region_start[row]
    return start.int(), (start + seen).int()


def key_ranges_gathered(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    region_start: torch.Tensor,
    *,
    token_start: int,
    compress_ratio: int,
    span: Span | None = None,
    row_stride: torch.Tensor | None = None,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
) -> None:
    """Write the ranges in the gathered layout."""
    check_positive(compress_ratio=compress_ratio)
    _check(query_start_loc, seq_lens, row_stride, region_start, key_start, key_end)
    start, end = key_ranges_gathered_reference(
        query_start_loc,
        seq_lens,
        region_start,
        key_start.numel(),
        token_start=token_start,
        compress_ratio=compress_ratio,
        span=span,
        row_stride=row_stride,
    )
    key_start.copy_(start)
    key_end.copy_(end)


def key_ranges_local_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    region_start: torch.Tensor,
    num_tokens: int,
    *,
    token_start: int,
    compress_ratio: int,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    span: Span | None = None,
    row_stride: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    row, seen = _seen_keys(query_start_loc, seq_lens, row_stride, num_tokens, token_start, compress_ratio)
    shard = {
        "dcp_size": dcp_size,
        "dcp_rank": dcp_rank,
        "interleave": keys_a_turn(interleave, compress_ratio, dcp_size),
    }
    start = region_start[row]
    if span is None:
        return start.int(), (start + dcp_local_lens_reference(seen, **shard)).int()
    before = dcp_local_lens_reference(torch.full_like(seen, span[0]), **shard)
    num_keys = dcp_local_lens_reference(seen.clamp(*span), **shard) - before
    return start.int(), (start + num_keys).int()


def key_ranges_local(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    region_start: torch.Tensor,
    *,
    token_start: int,
    compress_ratio: int,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    span: Span | None = None,
    row_stride: torch.Tensor | None = None,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
) -> None:
    """Write the ranges in one rank's own keys; interleave in tokens, span in keys of the whole request."""
    check_shard(dcp_size, dcp_rank, interleave)
    check_positive(compress_ratio=compress_ratio)
    check_states_whole(compress_ratio, dcp_size, interleave)
    _check(query_start_loc, seq_lens, row_stride, region_start, key_start, key_end)
    start, end = key_ranges_local_reference(
        query_start_loc,
        seq_lens,
        region_start,
        key_start.numel(),
        token_start=token_start,
        compress_ratio=compress_ratio,
        dcp_size=dcp_size,
        dcp_rank=dcp_rank,
        interleave=interleave,
        span=span,
        row_stride=row_stride,
    )
    key_start.copy_(start)
    key_end.copy_(end)


def key_rows_reference(key_start_loc: torch.Tensor, num_keys: int) -> torch.Tensor:
    key = torch.arange(num_keys, dtype=torch.int32, device=key_start_loc.device)
    return torch.searchsorted(key_start_loc[1:].contiguous(), key, right=True, out_int32=True)


def key_rows(key_start_loc: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write the row of each workspace key into out ([num_keys] int32).  key_start_loc 0 2 2 3 -> 0 0 2

    key_start_loc: [num_rows + 1] int32, running key counts; of rows that share a request's keys the first counts them.
    """
    check_tensor("key_start_loc", key_start_loc, torch.int32, (None,), out.device)
    check_tensor("out", out, torch.int32, (None,), out.device)
    out.copy_(key_rows_reference(key_start_loc, out.numel()))


def _seen_keys(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    row_stride: torch.Tensor | None,
    num_tokens: int,
    token_start: int,
    compress_ratio: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each token and the keys of its request that it may score, int64."""
    token = torch.arange(token_start, token_start + num_tokens, dtype=torch.int32, device=query_start_loc.device)
    row = find_rows(query_start_loc, token)
    pos = find_positions(query_start_loc, seq_lens, token, row, row_stride)
    seen = (pos.clamp(min=-1) + 1) // compress_ratio
    return row, torch.where(token < query_start_loc[-1], seen, 0)


def _check(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    row_stride: torch.Tensor | None,
    region_start: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
) -> None:
    device = query_start_loc.device
    check_rows(query_start_loc, seq_lens, row_stride)
    check_positive(num_rows=seq_lens.numel())
    check_tensor("region_start", region_start, torch.int64, (seq_lens.numel(),), device)
    check_tensor("key_start", key_start, torch.int32, (None,), device)
    check_tensor("key_end", key_end, torch.int32, (key_start.numel(),), device)
