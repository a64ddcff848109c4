"""Draft tokens (MTP) as passes of a draft module behind a step's layers.

    N drafts a decode       pass 1            passes 2 .. N
    tokens                  all of the step   one of each decode: a step of its own, planned like any other

A draft module is one layer that selects its own keys, with a product in front that joins hidden rows and embeddings,
and the model's output head; one module is applied N times. Prompts that end with the step draft from the next one on.
"""

import math

import numpy as np

from cpkit.batch import Batch
from cpkit.planner.partition import WHOLE
from cpkit.step import StepPlan, plan_step


def kept_tokens(num_drafts: int, acceptance_rate: float) -> float:
    """Tokens that a decode keeps of a step on average: its own, and drafts up to the first rejected one.

    2 drafts, each kept with a chance of 0.7 after those before it: 1 + 0.7 + 0.49 = 2.19
    """
    if acceptance_rate in (0, 1):
        return 1 + num_drafts * acceptance_rate
    return math.expm1((1 + num_drafts) * math.log(acceptance_rate)) / (acceptance_rate - 1)  # the series, summed up


def later_drafts(plan: StepPlan) -> StepPlan | None:
    """The plan of one later pass, for the same ranks; None where the step makes one draft, or has no decodes."""
    num_decodes = plan.batch.num_decodes
    if plan.budget.num_speculative_tokens < 2 or not num_decodes:
        return None
    seq_lens, prompt_lens = plan.batch.seq_lens[:num_decodes], plan.batch.prompt_lens[:num_decodes]
    ones = Batch.from_lens(seq_lens, np.ones_like(seq_lens), np.minimum(prompt_lens, seq_lens - 1))
    partition = plan.partition
    return plan_step(
        ones,
        plan.topology,
        plan.model,
        plan.budget,
        rank=[rank.rank for rank in plan.ranks],
        partition=partition.strategy,
        merge=plan.merge,
        shard_decode_requests=bool(partition.mode[0] == WHOLE) if plan.topology.pcp > 1 else None,
    )
