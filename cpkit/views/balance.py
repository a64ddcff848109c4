"""How evenly a step's work and keys lie on the ranks of a replica."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpkit.arrays import IntArray, seal
from cpkit.planner.work import causal_work
from cpkit.step import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Balance:
    """Amounts of each rank, in rank order.

    ranks: [n] int64, in the world. tokens: [n] int64, query tokens computed. causal_work: [n] int64, keys that those
    tokens see, over all layers. stored_keys: [n] int64, keys of the step's requests that the rank holds after the step,
    earlier ones included: one for every ratio of the model's sharded caches.
    """

    ranks: IntArray
    tokens: IntArray
    causal_work: IntArray
    stored_keys: IntArray


def plan_balance(plans: Sequence[StepPlan]) -> Balance:
    """Amounts of every rank that the plans hold; raises PlanError where the work of a rank does not fit int64.

    plans: of one step, each for one rank or several. Ranks at one place in PCP compute the same rows, and ranks at one
    place in DCP hold the same keys (Cover checks that), so that each place is counted once.
    """
    pairs = sorted(((plan, rank) for plan in plans for rank in plan.ranks), key=lambda pair: pair[1].rank)
    work_of: dict[int, int] = {}
    keys_of: dict[int, int] = {}
    for plan, rank in pairs:
        if rank.pcp_rank not in work_of:
            work_of[rank.pcp_rank] = causal_work(rank.rows, plan.model)
        if rank.dcp_rank not in keys_of:
            keys_of[rank.dcp_rank] = held_keys(plan, rank.dcp_rank)
    return Balance(
        ranks=_amounts([rank.rank for _, rank in pairs]),
        tokens=_amounts([rank.rows.total_tokens for _, rank in pairs]),
        causal_work=_amounts([work_of[rank.pcp_rank] for _, rank in pairs]),
        stored_keys=_amounts([keys_of[rank.dcp_rank] for _, rank in pairs]),
    )


def held_keys(plan: StepPlan, dcp_rank: int) -> int:
    """Keys of the step's requests in one rank's shards, of all ratios."""
    return sum(int(shards.local_lens(dcp_rank).sum()) for shards in plan.shards.values())


def imbalance(amounts: IntArray) -> float:
    """Largest over mean of the ranks' amounts, 1.0 being even.  2 2 4 -> 1.5;  nothing anywhere is even"""
    total = int(np.sum(amounts))
    return float(np.max(amounts)) * len(amounts) / total if total else 1.0


def _amounts(values: list[int]) -> IntArray:
    return seal(np.array(values, np.int64))
