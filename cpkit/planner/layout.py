"""The padded layout of an all-gather over PCP ranks, and the way back to batch order.

P = 2, one prefill A..G, head_tail:

    rank 0, rank 1      A B G _ | C D E F        _ is padding: every rank sends as many tokens as the fullest
    gather_idx          0 1 6 0   2 3 4 5        gathered = batch[gather_idx]
    writes_kv           1 1 1 0   1 1 1 1
    restore_idx         0 1 4 5 6 7 2            batch = gathered[restore_idx]
"""

from dataclasses import dataclass

import numpy as np

from cpkit.arrays import BoolArray, IntArray, prefix_sum, spread
from cpkit.errors import PlanError
from cpkit.planner.partition import Partition, Segments


@dataclass(frozen=True, slots=True, eq=False)
class GatherLayout:
    """Index arrays between the flat batch and the gathered layout.

    padded: tokens each rank sends. gather_idx: [P * padded] int64, flat token of each place (0 where padding).
    writes_kv: [P * padded], the place writes its token's KV. restore_idx: [num_tokens] int64, place of each flat token.
    """

    padded: int
    gather_idx: IntArray
    writes_kv: BoolArray
    restore_idx: IntArray


def gather_layout(partition: Partition, padded: int | None = None) -> GatherLayout:
    """Index arrays of a partition; `padded` forces a larger per-rank size, such as a captured graph's.

    Raises PlanError when `padded` is smaller than the fullest rank.
    """
    padded = padded_tokens(partition, padded)
    query_start = prefix_sum(partition.query_lens)[:-1]
    gather_idx = np.zeros(partition.pcp_size * padded, np.int64)
    writes_kv = np.zeros(partition.pcp_size * padded, np.bool_)
    restore_idx = np.full(int(partition.query_lens.sum()), -1, np.int64)
    for rank in range(partition.pcp_size):
        segments = partition.segments(rank)
        token = flat_tokens(segments, query_start)
        place = slice(rank * padded, rank * padded + len(token))
        gather_idx[place] = token
        writes_kv[place] = np.repeat(segments.writes_kv, segments.count)
    written = np.flatnonzero(writes_kv)
    restore_idx[gather_idx[written]] = written
    assert (restore_idx >= 0).all(), "a query token without a writing copy"
    return GatherLayout(padded, gather_idx, writes_kv, restore_idx)


def padded_tokens(partition: Partition, padded: int | None) -> int:
    """Tokens every rank sends: the fullest rank's, or the given larger number; raises PlanError when it is smaller."""
    if padded is None:
        return partition.padded
    if padded < partition.padded:
        raise PlanError(
            f"padded={padded} tokens a rank, but the fullest rank has {partition.padded}: nothing is dropped"
        )
    return padded


def flat_tokens(segments: Segments, query_start: IntArray) -> IntArray:
    """[tokens of the rank] int64, place in the flat batch of each token of a rank, in its local order.

    query_start: [num_reqs] int64, first flat token of each request.
    """
    first = np.repeat(query_start[segments.req] + segments.start, segments.count)
    token: IntArray = first + np.repeat(segments.stride, segments.count) * spread(segments.count)
    return token
