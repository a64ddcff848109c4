"""Where the decode part of a batch ends, and which neighbouring rows belong to one request."""

from typing import NamedTuple

import numpy as np

from cpkit.arrays import BoolArray, IntArray
from cpkit.errors import PlanError


class BatchSplit(NamedTuple):
    """A batch ordered decodes first, cut in two; the counts of both parts add up to the batch."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    query_lens: IntArray,
    is_prefilling: BoolArray | None = None,
    *,
    threshold: int,
    num_tokens: int | None = None,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> BatchSplit:
    """Cut a batch at its first row that is no decode.  threshold=2:

        query_lens  1 2 1 | 7 1      3 decodes of 4 tokens, 2 prefills of 8 tokens

    query_lens: [num_rows] int64. is_prefilling: [num_rows] bool, the row is still inside its prompt; read only with
    treat_short_extends_as_decodes=False. num_tokens: tokens of the batch, padding included (default: no padding); it
    goes with the prefills, or with the decodes where there are no prefills.
    A row is no decode if it is longer than `threshold`; with require_uniform also if it is neither empty nor as long as
    row 0; with treat_short_extends_as_decodes=False also if it is prefilling.
    Raises PlanError: fewer num_tokens than query tokens; with treat_short_extends_as_decodes=False an empty batch, or
    no is_prefilling (unless row 0 is above the threshold, which settles the matter).
    """
    num_rows = len(query_lens)
    num_real = int(query_lens.sum())
    num_tokens = num_real if num_tokens is None else num_tokens
    if num_tokens < num_real:
        raise PlanError(f"num_tokens={num_tokens} is below the {num_real} query tokens of the batch: padding adds only")
    first = leading_decodes(
        query_lens,
        is_prefilling,
        threshold=threshold,
        require_uniform=require_uniform,
        treat_short_extends_as_decodes=treat_short_extends_as_decodes,
    )
    num_decode_tokens = int(query_lens[:first].sum()) if first < num_rows else num_tokens
    return BatchSplit(first, num_rows - first, num_decode_tokens, num_tokens - num_decode_tokens)


def leading_decodes(
    query_lens: IntArray,
    is_prefilling: BoolArray | None = None,
    *,
    threshold: int,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> int:
    """Rows before the first that is no decode, by the rules of split_decodes_and_prefills; raises PlanError."""
    num_rows = len(query_lens)
    is_prefill = query_lens > threshold
    if not (num_rows and is_prefill[0]):
        if require_uniform:
            is_prefill |= (query_lens != query_lens[:1]) & (query_lens != 0)
        if not treat_short_extends_as_decodes:
            is_prefill |= _checked_flags(is_prefilling, num_rows)
    prefills = is_prefill.nonzero()[0]
    return int(prefills[0]) if len(prefills) else num_rows


def _checked_flags(is_prefilling: BoolArray | None, num_rows: int) -> BoolArray:
    if not num_rows:
        raise PlanError("an empty batch: without rows there is no is_prefilling to tell short extends from decodes")
    if is_prefilling is None or len(is_prefilling) != num_rows:
        given = "none" if is_prefilling is None else str(len(is_prefilling))
        raise PlanError(
            f"treat_short_extends_as_decodes=False needs is_prefilling for each of {num_rows} rows, got {given}"
        )
    return is_prefilling


def request_row_bounds(req_idx: IntArray) -> IntArray:
    """[num_runs + 1] int64, first row of each run of one request's rows, then the row count.  4 4 7 9 9 -> 0 2 3 5

    req_idx: [num_rows] int64, the request of each row. Raises PlanError: no rows, or a request in two separate runs.
    """
    if not len(req_idx):
        raise PlanError("no rows: a batch without work keeps one zero-token row")
    starts = np.ones(len(req_idx) + 1, np.bool_)
    starts[1:-1] = req_idx[1:] != req_idx[:-1]
    bounds = starts.nonzero()[0]
    heads = req_idx[bounds[:-1]]
    if (heads[1:] <= heads[:-1]).any():
        _check_adjacent(req_idx, heads)
    return bounds


def _check_adjacent(req_idx: IntArray, heads: IntArray) -> None:
    ids, counts = np.unique(heads, return_counts=True)
    if len(ids) != len(heads):
        req = int(ids[counts > 1][0])
        rows = np.flatnonzero(req_idx == req).tolist()
        raise PlanError(f"request {req} has rows {rows}: the rows of one request are adjacent")
