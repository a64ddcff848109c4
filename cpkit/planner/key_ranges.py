"""Which keys of the workspace each query token may score: the half-open ranges [key_start, key_end).

Two layouts exist, and two functions: this rank's own keys, request after request (`key_ranges_local`), or the keys of
all ranks gathered into token order (`key_ranges_gathered`). Keys are states of compress_ratio tokens; a state is seen
from its last token on. Under a key span [a, b) the workspace holds only those keys of one request.
"""

from typing import NamedTuple

import numpy as np

from cpkit.arrays import IntArray, prefix_sum
from cpkit.planner.interleave import keys_a_turn, local_lens
from cpkit.planner.state_slots import check_states_whole

Span = tuple[int, int]


class KeyRanges(NamedTuple):
    """Workspace keys that each query token may score."""

    key_start: IntArray  # [num_tokens]
    key_end: IntArray  # [num_tokens]


class ChunkTokens(NamedTuple):
    """The query tokens that a chunk entry scores."""

    start: int  # first of them, counted from the chunk's first query token
    stop: int  # after the last
    row: IntArray  # [stop - start], row of the chunk
    position: IntArray  # [stop - start], place in the request


def chunk_tokens(seq_lens: IntArray, query_lens: IntArray, query_slice: Span | None = None) -> ChunkTokens:
    """Row and position of a chunk's query tokens in a query slice, clipped to those that exist.

    seq_lens 5 7, query_lens 2 3, query_slice (1, 9):

        row        0 1 1 1
        position   4 4 5 6       start 1, stop 5

    seq_lens, query_lens: [num_rows] int64, of the chunk's rows, in tokens. query_slice: None for all tokens.
    """
    query_start_loc = prefix_sum(query_lens)
    total = int(query_start_loc[-1])
    first, last = (0, total) if query_slice is None else query_slice
    start, stop = min(first, total), min(last, total)
    token = np.arange(start, stop)
    row = np.searchsorted(query_start_loc[1:], token, side="right")
    return ChunkTokens(start, stop, row, token + (seq_lens - query_lens - query_start_loc[:-1])[row])


def key_ranges_local(
    positions: IntArray,
    row: IntArray,
    region_start: IntArray,
    *,
    compress_ratio: int = 1,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    span: Span | None = None,
) -> KeyRanges:
    """Ranges in one rank's own keys, laid row after row.  dcp_size=2, interleave=1, a request of 5 tokens:

        position     2 3 4         rank 0 holds t0 t2 t4, rank 1 t1 t3
        rank 0     0-2 0-2 0-3
        rank 1     0-1 0-2 0-2

    positions, row: [num_tokens] int64, place in the request and row of each query token. region_start: [num_rows + 1]
    int64, first of the row's keys on this rank. interleave in tokens; span in keys of the whole request.
    Raises ConfigError if a state would span two ranks.
    """
    check_states_whole(compress_ratio, dcp_size, interleave)
    turn = keys_a_turn(interleave, compress_ratio, dcp_size)
    seen = (positions + 1) // compress_ratio
    if span is not None:
        seen = np.clip(seen, *span)
    num_keys = local_lens(seen, dcp_rank, dcp_size, turn)
    if span is not None:
        num_keys = num_keys - local_lens(np.array(span[0]), dcp_rank, dcp_size, turn)
    start = region_start[row]
    return KeyRanges(start, start + num_keys)


def key_ranges_gathered(
    positions: IntArray, row: IntArray, region_start: IntArray, *, compress_ratio: int = 1, span: Span | None = None
) -> KeyRanges:
    """Ranges in the keys of all ranks, gathered into token order, the same on every rank.  Region starts 0 8:

        row, position   0,2  1,0  1,5
        range           0-3  8-9  8-14

    region_start: [num_rows + 1] int64, first of the row's request in the gathered layout; other arguments as above.
    """
    seen = (positions + 1) // compress_ratio
    if span is not None:
        seen = np.clip(seen, *span) - span[0]
    start = region_start[row]
    return KeyRanges(start, start + seen)


def key_rows(num_keys: IntArray) -> IntArray:
    """[sum(num_keys)] int64, the row that each key of the workspace belongs to.  2 0 1 -> 0 0 2

    num_keys: [num_rows] int64; where several rows share a request's keys, the first row counts them, the others 0.
    """
    return np.repeat(np.arange(len(num_keys)), num_keys)
