"""Context lengths of decode rows: expand per token, then localise to the DCP rank, then divide by the ratio.

A request with context L and n query tokens this step shows its token j the first L - n + 1 + j keys.
"""

from typing import NamedTuple

import numpy as np

from cpkit.arrays import IntArray, spread
from cpkit.errors import PlanError
from cpkit.planner.interleave import local_lens
from cpkit.planner.slots import BlockTables
from cpkit.planner.state_slots import check_states_whole


class FlatDecodes(NamedTuple):
    """Decodes as rows of one query token each."""

    seq_lens: IntArray  # [num_rows], context each token sees; 0 in padding rows
    req: IntArray  # [num_rows], request of each row; padding rows count on from num_reqs


def flatten_decodes(seq_lens: IntArray, query_lens: IntArray, *, num_rows: int | None = None) -> FlatDecodes:
    """One row per query token.  seq_lens 9 4, query_lens 3 1, num_rows=6:

        seq_lens   7 8 9 4 0 0
        req        0 0 0 1 2 3

    For kernels that take one query token a row, and for those that take any number and read `req`.
    seq_lens, query_lens: [num_reqs] int64. num_rows: rows with padding (default: none). Lengths are never below 0: a
    padding request has seq_len 0 whatever its query length. Raises PlanError if num_rows are too few.
    """
    num_tokens = int(query_lens.sum())
    padding = 0 if num_rows is None else num_rows - num_tokens
    if padding < 0:
        raise PlanError(f"{num_rows} rows for {num_tokens} decode tokens: padding adds only")
    num_reqs = len(query_lens)
    req = np.repeat(np.arange(num_reqs), query_lens)
    lens = np.maximum(spread(query_lens, seq_lens - query_lens) + 1, 0)
    return FlatDecodes(
        np.append(lens, np.zeros(padding, np.int64)),
        np.append(req, np.arange(num_reqs, num_reqs + padding)),
    )


def native_decodes(seq_lens: IntArray, query_lens: IntArray, *, width: int | None = None) -> IntArray:
    """One row per request, its query tokens packed from the left.  seq_lens 9 4, query_lens 3 1:

        7 8 9
        4 0 0

    seq_lens, query_lens: [num_reqs] int64. Returns [num_reqs, width] int64 (default: the longest query), 0 where a
    request has no such token, never below 0. Raises PlanError if a query is longer than `width`.
    """
    longest = int(query_lens.max(initial=0))
    width = longest if width is None else width
    if longest > width:
        raise PlanError(f"a decode of {longest} query tokens in rows of {width}: widen the rows or flatten the decodes")
    token = np.arange(width)
    lens = (seq_lens - query_lens + 1)[:, None] + token
    return np.where(token < query_lens[:, None], np.maximum(lens, 0), 0)


def local_decode_lens(
    lens: IntArray, *, dcp_size: int, dcp_rank: int, interleave: int, compress_ratio: int = 1
) -> IntArray:
    """Expanded context lengths in keys of one DCP rank.  dcp_size=2, interleave=1, rank 1: 8 9 10 -> 4 4 5

    lens: int64 of any shape, from flatten_decodes or native_decodes: a request's length sharded first and counted down
    per token would give 3 4 5. Raises ConfigError if a state would span two ranks.
    """
    check_states_whole(compress_ratio, dcp_size, interleave)
    return local_lens(lens, dcp_rank, dcp_size, interleave) // compress_ratio


def expand_block_tables(block_tables: BlockTables, req: IntArray) -> BlockTables:
    """[num_rows, width], the block table row of each decode row; zeros, all of them, for padding rows.

    req: [num_rows] int64, from flatten_decodes. The dtype of block_tables is kept.
    """
    num_reqs = len(block_tables)
    out = np.zeros((len(req), block_tables.shape[1]), block_tables.dtype)
    real = req < num_reqs
    out[real] = block_tables[req[real]]
    return out
