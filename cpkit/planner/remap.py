"""From kept positions to physical rows: in this rank's shard of the cache, or in a gathered prefill workspace."""

from typing import NamedTuple

import numpy as np

from cpkit.arrays import IntArray
from cpkit.errors import PlanError
from cpkit.planner.interleave import split_position
from cpkit.planner.slots import PAD, BlockTables


class CompactRows(NamedTuple):
    """Kept rows moved to the front of each token's list."""

    rows: IntArray  # [num_tokens, k], in their former order, then PAD
    counts: IntArray  # [num_tokens], how many are left


def shard_rows_of(
    positions: IntArray,
    req: IntArray,
    block_tables: BlockTables,
    *,
    block_size: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    block_stride: int | None = None,
) -> IntArray:
    """Cache row of each position that this rank owns.  block_size=2, dcp_size=2, interleave=1, block table 4 6:

        position   5 2 0 -1 3
        rank 0     - 9 8  - -
        rank 1    12 - -  - 9

    positions: [num_tokens, k] int64, negative = none. req: [num_tokens] int64, row of block_tables.
    block_stride: rows from one block to the next (default block_size; more where pages hold other tensors too).
    Returns [num_tokens, k] int64; PAD for no position, another rank's, or one past the block table.
    """
    owner, local = split_position(np.maximum(positions, 0), dcp_size, interleave)
    column, offset = np.divmod(local, block_size)
    here = (positions >= 0) & (owner == dcp_rank) & (column < block_tables.shape[1])
    if not here.any():
        return np.full(positions.shape, PAD, np.int64)
    block = block_tables[req[:, None], np.where(here, column, 0)].astype(np.int64)
    return np.where(here, block * (block_size if block_stride is None else block_stride) + offset, PAD)


def gathered_rows(
    positions: IntArray,
    workspace_start: IntArray,
    *,
    rank_stride: int,
    dcp_size: int,
    interleave: int,
    rank_rows: int | None = None,
) -> IntArray:
    """Workspace row of each position, whoever owns it.  rank_stride=4, dcp_size=2, interleave=1, workspace_start=1:

        workspace  .  t0 t2 t4 | .  t1 t3 --      rank after rank, each rank_stride rows
        position   3 0 -1
        row        6 1  -

    positions: [num_tokens, k] int64, negative = none. workspace_start: [num_tokens] int64, first row of the token's
    request in each rank's part. rank_stride: rows from one rank's part to the next; rank_rows: rows of a part that hold
    keys (default: all). Returns [num_tokens, k] int64; PAD for no position or one beyond the rank's part.
    """
    owner, local = split_position(np.maximum(positions, 0), dcp_size, interleave)
    row = workspace_start[:, None] + local
    held = row < (rank_stride if rank_rows is None else rank_rows)
    return np.where((positions >= 0) & held, owner * rank_stride + row, PAD)


def compact_rows(rows: IntArray) -> CompactRows:
    """Move the rows to keep to the front, in order, so that every run gives the same list.  - 9 8 - -> 9 8 - -, 2"""
    kept = rows != PAD
    order = np.argsort(~kept, axis=1, kind="stable")
    return CompactRows(np.take_along_axis(rows, order, axis=1), kept.sum(axis=1))


def mapped_requests(req: IntArray, idx_mapping: IntArray | None = None) -> IntArray:
    """Row of the block tables of each token's request; a negative entry of idx_mapping stands for row 0.

    req: [num_tokens] int64; idx_mapping: [num_reqs] int64 or None (rows are requests).
    """
    if idx_mapping is None:
        return req
    outside = (req < 0) | (req >= len(idx_mapping))
    if outside.any():
        raise PlanError(f"request index {int(req[outside][0])} with an idx_mapping of {len(idx_mapping)} entries")
    return np.maximum(idx_mapping[req], 0)
