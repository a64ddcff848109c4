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
from cpkit.errors import PlanError
from cpkit.planner.interleave import join_position, local_lens
from cpkit.planner.layout import GatherLayout
from cpkit.planner.layout import gather_layout as _gather_layout
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
    shards = plan.shards[ratio]
    batch = plan.batch
    before, after = batch.num_computed // ratio, shards.num_keys
    if shards.dcp_size > 1:
        before = local_lens(before, rank.dcp_rank, shards.dcp_size, shards.interleave)
        after = local_lens(after, rank.dcp_rank, shards.dcp_size, shards.interleave)
    count = after - before
    req = np.repeat(np.arange(batch.num_reqs), count)
    local = spread(count, before)
    key = join_position(rank.dcp_rank, local, shards.dcp_size, shards.interleave)
    return StoredKeys(req, key, _slots(plan, req, local, ratio))


def gather_layout(plan: StepPlan) -> GatherLayout:
    """Index arrays between the flat batch and the padded layout of the PCP all-gathers."""
    return _gather_layout(plan.partition, plan.padded)


def _slots(plan: StepPlan, req: IntArray, local: IntArray, ratio: int) -> IntArray | None:
    tables = plan.batch.block_tables
    if tables is None:
        return None
    states_per_block = plan.topology.block_size // ratio
    column, offset = np.divmod(local, states_per_block)
    if len(local) and int(column.max()) >= tables.shape[1]:
        i = int(np.argmax(column))
        raise PlanError(
            f"request {int(req[i])} stores key {int(local[i])} of its shard in block column {int(column[i])}, but its "
            f"block table has {tables.shape[1]} columns: allocate one for every {plan.topology.virtual_block} tokens"
        )
    block = tables[req, column].astype(np.int64)
    if len(block) and int(block.min()) == 0:
        i = int(np.argmin(block))
        raise PlanError(f"request {int(req[i])} would write block 0, the null block, at block column {int(column[i])}")
    return block * states_per_block + offset
