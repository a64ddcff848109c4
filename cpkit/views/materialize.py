"""Index arrays of a plan, made on demand: a plan itself holds only formulas.

What one rank writes to a sharded cache in a step, block_size=2, dcp_size=2, interleave=1, a request with 3 computed
tokens, 4 new ones and blocks 7 and 9 (each id spans block_size * dcp_size = 4 positions):

    key (position)    3 4 5 6
    owner             1 0 1 0
    rank 0 stores     key 4 -> local 2 -> slot 9 * 2 + 0 = 18,    key 6 -> local 3 -> slot 19
    rank 1 stores     key 3 -> local 1 -> slot 7 * 2 + 1 = 15,    key 5 -> local 2 -> slot 18
"""

from dataclasses import dataclass

import numpy as np

from cpkit.arrays import IntArray, spread
from cpkit.planner.interleave import join_position, local_lens
from cpkit.planner.layout import GatherLayout
from cpkit.planner.layout import gather_layout as _gather_layout
from cpkit.planner.slots import write_slots
from cpkit.step import RankPlan, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StoredKeys:
    """Keys that one rank writes in a step to the caches of one ratio, by request and position.

    req, key, slot: [n] int64; key counts compressed states (positions for ratio 1); slot is the row of the paged cache,
    or None when the batch has no block tables.
    """

    req: IntArray
    key: IntArray
    slot: IntArray | None


def stored_keys(plan: StepPlan, rank: RankPlan, ratio: int) -> StoredKeys:
    """What a rank stores of this step's keys; its cost grows with its own share alone.

    Raises PlanError when a block table is too narrow for a key, or names the null block for it.
    """
    shards, tables = plan.shards[ratio], plan.batch.block_tables
    before, after = shard_lens(plan, rank.dcp_rank, ratio)
    req = np.repeat(np.arange(plan.batch.num_reqs), after - before)
    local = spread(after - before, before)
    key = join_position(rank.dcp_rank, local, shards.dcp_size, shards.interleave)
    if tables is None:
        return StoredKeys(req, key, None)
    last_position = (key + 1) * ratio - 1
    return StoredKeys(req, key, write_slots(local, req, tables, plan.topology.block_size // ratio, last_position))


def shard_lens(plan: StepPlan, dcp_rank: int, ratio: int) -> tuple[IntArray, IntArray]:
    """[num_reqs] int64 each, keys of every request on one DCP rank before and after this step."""
    shards = plan.shards[ratio]
    before = local_lens(plan.batch.num_computed // ratio, dcp_rank, shards.dcp_size, shards.interleave)
    return before, shards.local_lens(dcp_rank)


def gather_layout(plan: StepPlan) -> GatherLayout:
    """Index arrays between the flat batch and the padded layout of the PCP all-gathers."""
    return _gather_layout(plan.partition, plan.padded)
