"""What a replay came to: the values behind the report and its JSON."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cpkit.arrays import FloatArray
from cpkit.budget import ACCEPTANCE_RATE
from cpkit.settings import StepSettings
from cpkit.simulate.cost import ReplayCost
from cpkit.simulate.record import BrokenStep, StepRecord
from cpkit.views.traffic import Traffic
from cpkit.workload.request import Trace
from cpkit.workload.stats import ReplayStats

FORMAT = "cpkit-simulation-1"
MAX_BROKEN = 10
"""Broken steps that a report keeps; all are counted."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How a trace is replayed.

    num_kv_blocks: block ids of the pool, the null block included. max_steps: stop after so many; None: at the end.
    check_every: check each step whose index it divides; 0: none. processes: that plan and check, with the same result.
    """

    num_kv_blocks: int
    max_model_len: int
    seed: int = 0
    acceptance_rate: float = ACCEPTANCE_RATE
    max_steps: int | None = None
    check_every: int = 1
    processes: int = 1

    def checks(self, index: int) -> bool:
        """This step is checked."""
        return self.check_every > 0 and index % self.check_every == 0


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 99th percentile over steps or requests (of the values themselves, none in between)."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most of anything in one step: KV blocks held, and workspace tokens and logits of one chunk of one rank."""

    kv_blocks: int
    workspace_tokens: int
    logits_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A replay, whole or as far as it came.

    num_steps, num_tokens, num_decode_tokens: of the steps planned; num_checked: of them, checked.
    balance: max/mean over ranks of tokens, causal_work and stored_keys. traffic: one rank's, over all steps
        and all layers (with pipeline stages a rank has its share of them).
    ttft_s, latency_s: seconds over requests, from when one could start to its first token and to its end.
    cost: figures of the cost model, where it was the clock.
    planner_us: one rank's plan of a step; planner_all_us: all ranks of it, one after another.
    broken: the first MAX_BROKEN steps that break a promise. complete: the trace or max_steps was reached.
    """

    trace: Trace
    settings: StepSettings
    replay: ReplaySettings
    stats: ReplayStats
    num_steps: int
    num_checked: int
    num_tokens: int
    num_decode_tokens: int
    num_violations: int
    num_broken: int
    broken: tuple[BrokenStep, ...]
    balance: dict[str, Quantiles]
    traffic: dict[tuple[str, str], Traffic]
    peaks: Peaks
    ttft_s: Quantiles
    latency_s: Quantiles
    planner_us: Quantiles
    planner_all_us: Quantiles
    cost: ReplayCost | None
    wall_s: float
    complete: bool

    @property
    def num_ranks(self) -> int:
        """Ranks planned in each step: those of one replica."""
        return self.settings.topology.replica_size

    def to_json(self) -> dict[str, Any]:
        """Plain data: what `cpkit simulate --json` writes."""
        return {
            "format": FORMAT,
            "trace": {"name": self.trace.name, "format": self.trace.format, "skipped": self.trace.num_skipped},
            "model": self.settings.model.name,
            "topology": asdict(self.settings.topology),
            "budget": asdict(self.settings.budget),
            "partition": self.settings.partition,
            "merge": self.settings.merge,
            "replay": asdict(self.replay),
            "complete": self.complete,
            "requests": len(self.trace.requests),
            "finished": self.stats.num_finished,
            "refused": self.stats.num_refused,
            "refused_reasons": dict(self.stats.refused),
            "steps": self.num_steps,
            "checked_steps": self.num_checked,
            "tokens": self.num_tokens,
            "decode_tokens": self.num_decode_tokens,
            "ranks": self.num_ranks,
            "violations": self.num_violations,
            "broken_steps": [
                {"step": step.index, "violations": [asdict(violation) for violation in step.violations]}
                for step in self.broken
            ],
            "balance": {name: asdict(quantiles) for name, quantiles in self.balance.items()},
            "collectives": [
                {"op": op, "group": group, "calls": total.calls, "bytes": total.bytes}
                for (op, group), total in self.traffic.items()
            ],
            "peaks": asdict(self.peaks),
            "prefix_hit_rate": self.stats.prefix_hit_rate,
            "preemptions": self.stats.num_preemptions,
            "ttft_s": asdict(self.ttft_s),
            "latency_s": asdict(self.latency_s),
            "planner_us": {**asdict(self.planner_us), "all_ranks": asdict(self.planner_all_us)},
            "simulated_s": self.stats.elapsed_s,
            "cost": None if self.cost is None else self.cost.to_json(),
            "wall_s": self.wall_s,
        }


def summarise(
    trace: Trace,
    settings: StepSettings,
    replay: ReplaySettings,
    records: Sequence[StepRecord],
    stats: ReplayStats,
    *,
    cost: ReplayCost | None,
    wall_s: float,
    complete: bool,
) -> Simulation:
    """The records of all steps as one value."""
    broken = [record.broken for record in records if record.broken is not None]
    planner_us = [1e6 * record.planner_s for record in records]
    return Simulation(
        trace=trace,
        settings=settings,
        replay=replay,
        stats=stats,
        num_steps=len(records),
        num_checked=sum(replay.checks(record.index) for record in records),
        num_tokens=sum(record.num_tokens for record in records),
        num_decode_tokens=sum(record.num_decode_tokens for record in records),
        num_violations=sum(len(step.violations) for step in broken),
        num_broken=len(broken),
        broken=tuple(broken[:MAX_BROKEN]),
        balance={
            name: quantiles([getattr(record, name) for record in records])
            for name in ("tokens", "causal_work", "stored_keys")
        },
        traffic=total_traffic(records),
        peaks=Peaks(
            kv_blocks=stats.peak_blocks,
            workspace_tokens=max((record.workspace_tokens for record in records), default=0),
            logits_bytes=max((record.logits_bytes for record in records), default=0),
        ),
        ttft_s=quantiles(stats.ttft_s),
        latency_s=quantiles(stats.latency_s),
        planner_us=quantiles([us / settings.topology.replica_size for us in planner_us]),
        planner_all_us=quantiles(planner_us),
        cost=cost,
        wall_s=wall_s,
        complete=complete,
    )


def quantiles(values: Sequence[float] | FloatArray) -> Quantiles:
    """Median and 99th percentile, each one of the values (the lower of two); zeros where there are none."""
    if not len(values):
        return Quantiles(0.0, 0.0)
    p50, p99 = np.percentile(values, [50, 99], method="lower").tolist()
    return Quantiles(p50, p99)


def total_traffic(records: Sequence[StepRecord]) -> dict[tuple[str, str], Traffic]:
    """Calls and bytes over all steps by (operation, group), sorted by name."""
    calls: defaultdict[tuple[str, str], int] = defaultdict(int)
    sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for record in records:
        for kind, traffic in record.traffic.items():
            calls[kind] += traffic.calls
            sizes[kind] += traffic.bytes
    return {kind: Traffic(calls[kind], sizes[kind]) for kind in sorted(calls)}
