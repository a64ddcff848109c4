"""One step of a replay, planned for every rank and checked: the numbers that a report keeps of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from cpkit.batch import Batch
from cpkit.errors import PlanError
from cpkit.promises import Violation, check_step
from cpkit.settings import StepSettings
from cpkit.step import StepPlan
from cpkit.views.balance import imbalance, plan_balance
from cpkit.views.traffic import Traffic, step_traffic


@dataclass(frozen=True, slots=True, eq=False)
class BrokenStep:
    """A step that breaks promises; its batch is all that is needed to plan it again."""

    index: int
    batch: Batch
    violations: tuple[Violation, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """What is kept of a step.

    num_decode_tokens: query tokens of requests past their prompt. planner_s: seconds of all ranks' planning together.
    tokens, causal_work, stored_keys: largest rank over mean. workspace_tokens, logits_bytes: of the largest chunk of
    any rank. traffic: one rank's, by (operation, group). broken: the step, if a promise was broken.
    """

    index: int
    num_tokens: int
    num_decode_tokens: int
    planner_s: float
    tokens: float
    causal_work: float
    stored_keys: float
    workspace_tokens: int
    logits_bytes: int
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    broken: BrokenStep | None = None


def record_step(settings: StepSettings, index: int, batch: Batch, *, check: bool) -> StepRecord:
    """Plan a step for each rank on its own, and check the plans together; a PlanError names the step."""
    start = perf_counter()
    try:
        plans = [settings.plan(batch, rank) for rank in range(settings.topology.replica_size)]
    except PlanError as error:
        raise PlanError(
            f"step {index} ({batch.num_reqs} requests, {batch.num_tokens} query tokens): {error}"
        ) from error
    planner_s = perf_counter() - start
    violations = check_step(plans) if check else ()
    balance = plan_balance(plans)
    workspace, logits = _peaks(plans)
    return StepRecord(
        index=index,
        num_tokens=batch.num_tokens,
        num_decode_tokens=int(batch.query_start_loc[batch.num_decodes]),
        planner_s=planner_s,
        tokens=imbalance(balance.tokens),
        causal_work=imbalance(balance.causal_work),
        stored_keys=imbalance(balance.stored_keys),
        workspace_tokens=workspace,
        logits_bytes=logits,
        traffic=step_traffic(plans[0].collectives, settings.model),
        broken=BrokenStep(index, batch, violations) if violations else None,
    )


def _peaks(plans: Sequence[StepPlan]) -> tuple[int, int]:
    """Most workspace tokens and most bytes of logits that a chunk of any rank takes."""
    workspace = logits = 0
    for rank in (rank for plan in plans for rank in plan.ranks):
        for ratio, chunks in rank.chunks.items():
            for chunk in chunks:
                workspace = max(workspace, chunk.num_keys * ratio)
                logits = max(logits, 4 * chunk.peak_logits)
    return workspace, logits
