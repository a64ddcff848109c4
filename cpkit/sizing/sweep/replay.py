"""One candidate of a sweep replayed: its share of the trace through the scheduler, on the cost model's quick clock."""

from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from cpkit.arrays import FloatArray
from cpkit.budget import ACCEPTANCE_RATE, Budget
from cpkit.model import Model
from cpkit.planner.partition import STRATEGIES
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.clock import QuickClock
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.sweep.candidate import Candidate
from cpkit.sizing.weights import ModelWeights
from cpkit.topology import Topology
from cpkit.workload.request import Request, Trace
from cpkit.workload.scheduler import Scheduler

DECODE_STRIDE = 32
"""Steps of decodes alone that are replayed as one."""


@dataclass(frozen=True, slots=True, eq=False)
class SweepSetting:
    """What all candidates of a sweep share.

    engine: whose rules, caches and layers' times count. budget: all but max_num_batched_tokens is taken
    from it. merge: ag_rs or a2a. acceptance_rate: chance that a draft token is kept, given that those before it were.
    """

    model: Model
    weights: ModelWeights
    chip: str
    budget: Budget
    max_model_len: int
    engine: str = "cpkit"
    merge: str = "ag_rs"
    acceptance_rate: float = ACCEPTANCE_RATE
    assumptions: Assumptions = Assumptions()  # noqa: RUF009  # frozen
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a candidate's replay came to, of one replica unless said otherwise.

    ttft_s, tpot_s, queue_s: [p50, p99] over requests, in seconds. tokens_s_gpu: prompt and output tokens of requests
    in a second of the replay, a GPU. capacity: tokens of context that all replicas have room for. kv_peak: most KV
    blocks held, as a share of the pool. busy: share of the time in which a step ran. finished, refused: requests.
    """

    candidate: Candidate
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    queue_s: tuple[float, float]
    tokens_s_gpu: float
    capacity: int
    kv_peak: float
    busy: float
    prefix_hit_rate: float
    finished: int
    refused: int
    preemptions: int
    steps: int
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain data; from_json undoes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Outcome":
        """An outcome from a results file; raises ValueError, TypeError or KeyError where there is none."""
        pairs = {name: _read_pair(data[name]) for name in ("ttft_s", "tpot_s", "queue_s")}
        candidate = Candidate(**data["candidate"])
        if candidate.partition not in STRATEGIES:
            raise ValueError(f"partition={candidate.partition!r}: it is none")
        numbers = {**data["candidate"], **data}
        for name in numbers.keys() - pairs.keys() - {"candidate", "partition"}:
            if not isinstance(numbers[name], int | float):
                raise ValueError(f"{name}={numbers[name]!r}: it is a number")
        return cls(**{**data, **pairs, "candidate": candidate})


def share_of(trace: Trace, replicas: int) -> Trace:
    """Requests of the first of so many replicas: sessions, or requests without one, are dealt out in turn."""
    if replicas == 1:
        return trace
    turn: dict[str | int, int] = {}
    kept: list[Request] = []
    new_id: dict[int, int] = {}
    for request in trace.requests:
        key = request.req_id if request.session is None else request.session
        if turn.setdefault(key, len(turn)) % replicas:
            continue
        new_id[request.req_id] = len(kept)
        before = None if request.depends_on is None else new_id[request.depends_on]
        kept.append(replace(request, req_id=len(kept), depends_on=before))
    return replace(trace, requests=tuple(kept))


def replay(trace: Trace, setting: SweepSetting, candidate: Candidate, num_blocks: int) -> Outcome:
    """Replay a candidate's share of a trace; num_blocks: ids of a rank's pool. PlanError: a step cannot be planned."""
    start = perf_counter()
    topology = Topology(
        pcp=candidate.pcp,
        tp=candidate.tp,
        dcp=candidate.dcp,
        interleave=candidate.interleave,
        block_size=candidate.block_size,
    )
    budget = replace(setting.budget, max_num_batched_tokens=candidate.max_num_batched_tokens)
    settings = StepSettings(topology, setting.model, budget, candidate.partition, setting.merge)
    cost = CostModel(setting.model, setting.weights, topology, chip(setting.chip), setting.assumptions, setting.engine)
    scheduler = Scheduler(
        share_of(trace, candidate.replicas),
        topology,
        budget,
        num_kv_blocks=num_blocks,
        max_model_len=setting.max_model_len,
        acceptance_rate=setting.acceptance_rate,
        clock=QuickClock(cost, settings, setting.max_model_len),
        decode_stride=1 if budget.num_speculative_tokens else DECODE_STRIDE,
        seed=setting.seed,
    )
    busy_s = sum(step.duration_s for step in scheduler)
    stats = scheduler.stats
    elapsed_s = stats.elapsed_s or 1.0
    return Outcome(
        candidate=candidate,
        ttft_s=_pair(stats.ttft_s),
        tpot_s=_pair(stats.tpot_s),
        queue_s=_pair(stats.queue_s),
        tokens_s_gpu=(stats.prompt_tokens + stats.output_tokens) / elapsed_s / (candidate.gpus // candidate.replicas),
        capacity=candidate.replicas * (num_blocks - 1) * topology.virtual_block,
        kv_peak=stats.peak_blocks / max(num_blocks - 1, 1),
        busy=busy_s / elapsed_s,
        prefix_hit_rate=stats.prefix_hit_rate,
        finished=stats.num_finished,
        refused=stats.num_refused,
        preemptions=stats.num_preemptions,
        steps=stats.num_steps,
        wall_s=perf_counter() - start,
    )


def _pair(values: FloatArray) -> tuple[float, float]:
    if not len(values):
        return 0.0, 0.0
    p50, p99 = np.percentile(values, [50, 99], method="lower").tolist()
    return p50, p99


def _read_pair(values: Any) -> tuple[float, float]:
    p50, p99 = map(float, values)
    return p50, p99
