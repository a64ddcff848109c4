"""The promises of a planned step, checked on the plans of all ranks: Cover, Agree, Bounded.

cover    every query token computed once, or by all ranks with one KV writer, and put back where it was; every new key
         stored once per DCP group, in a slot of its own; every visible key of every prefill row scored once
agree    every rank plans the same step: inputs, chunk bounds, padded sizes, collectives
bounded  nothing exceeds the budget

A check counts. It takes a plan's values as they are and marks off tokens, keys and slots; it shares no rule with the
planner, so that an error there cannot excuse itself here.
"""

from collections.abc import Sequence

from cpkit.errors import PlanError
from cpkit.promises.agree import agree_chunks, agree_inputs, agree_plans
from cpkit.promises.bounded import bounded
from cpkit.promises.chunks import cover_chunks
from cpkit.promises.held import hold
from cpkit.promises.keys import cover_keys
from cpkit.promises.queries import cover_queries
from cpkit.promises.rows import cover_rows
from cpkit.promises.violation import Violation
from cpkit.step import StepPlan

__all__ = ["Violation", "check_step"]


def check_step(plans: Sequence[StepPlan]) -> tuple[Violation, ...]:
    """Every promise that a step breaks; empty when all are kept.

    plans: of one step, made independently (usually one rank each); together they hold each rank of a replica once, else
    PlanError. Where ranks were given different inputs nothing is common to count against, and that alone is reported.
    """
    if not plans:
        raise PlanError("no plans to check: give those of every rank of a replica")
    if apart := tuple(agree_inputs(plans)):
        return apart
    replica = hold(plans)
    rows = tuple(cover_rows(replica))
    unsound = {rank for broken in rows if broken.rule == "rows" for rank in broken.ranks}
    return (
        *agree_plans(replica),
        *agree_chunks(replica),
        *bounded(replica),
        *rows,
        *cover_queries(replica, unsound),
        *cover_keys(replica),
        *cover_chunks(replica, unsound),
    )
