"""What a replay on the cost model's clock came to: waits, throughput, pressure, and where the seconds went."""

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cpkit.arrays import FloatArray
from cpkit.simulate.pressure import Level, Pressure
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.clock import PlannedClock
from cpkit.workload.stats import ReplayStats


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles over requests (values themselves, none in between); zeros where there are none."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class ReplayCost:
    """Figures of a replay whose clock is the cost model.

    ttft_s, tpot_s, queue_s: over requests. busy: share of the replay's time in which a step ran.
    prompt_tokens_s, output_tokens_s: prompts taken in, those found in the cache included, and outputs given, in a
        second; per_gpu: both together, over the GPUs of the replica.
    kv, running, waiting: KV blocks held as a share of the pool, and requests, weighed by time.
    stages, collectives: seconds of all steps; the sum exceeds busy seconds where collectives hide behind computation.
    engine: whose layers were timed, None for the kernels alone. kinds: the same seconds by the kind of their source;
        sources: of each stage, and of each of what travels. idle: by rank, share of the steps' time that it waited for
        slower ranks; ranks of one PCP place are alike, and the first of each place stands for them.
    """

    chip: str
    engine: str | None
    assumptions: Assumptions
    ttft_s: Spread
    tpot_s: Spread
    queue_s: Spread
    busy: float
    prompt_tokens_s: float
    output_tokens_s: float
    per_gpu: float
    kv: Level
    running: Level
    waiting: Level
    stages: dict[str, float]
    collectives: dict[str, float]
    kinds: dict[str, float]
    sources: dict[str, dict[str, float]]
    idle: dict[int, float]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = asdict(self)
        data["idle"] = {str(rank): share for rank, share in self.idle.items()}
        return data


def summarise_cost(
    clock: PlannedClock, pressure: Pressure, stats: ReplayStats, *, num_blocks: int, num_gpus: int
) -> ReplayCost:
    """num_blocks: ids of the pool, the null block included; num_gpus: of the replica."""
    totals, elapsed_s = clock.totals, stats.elapsed_s or 1.0
    prompt_s, output_s = stats.prompt_tokens / elapsed_s, stats.output_tokens / elapsed_s
    held = pressure.level("held_blocks")
    kinds: defaultdict[str, float] = defaultdict(float)
    sources: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (name, kind), spent in totals.sources.items():
        kinds[kind] += spent
        sources[name][kind] = spent
    usable = max(num_blocks - 1, 1)
    seconds = totals.seconds or 1.0
    return ReplayCost(
        chip=clock.model.chip.label,
        engine=clock.model.engine,
        assumptions=clock.model.assumptions,
        ttft_s=spread(stats.ttft_s),
        tpot_s=spread(stats.tpot_s),
        queue_s=spread(stats.queue_s),
        busy=pressure.busy_s / elapsed_s,
        prompt_tokens_s=prompt_s,
        output_tokens_s=output_s,
        per_gpu=(prompt_s + output_s) / num_gpus,
        kv=Level(held.mean / usable, held.p99 / usable, held.most / usable),
        running=pressure.level("running"),
        waiting=pressure.level("waiting"),
        stages=dict(totals.stages),
        collectives=dict(totals.collectives),
        kinds=dict(kinds),
        sources=dict(sources),
        idle={rank: idle / seconds for rank, idle in totals.idle.items()},
    )


def spread(values: FloatArray) -> Spread:
    """Quantiles of values in any order."""
    if not len(values):
        return Spread(0.0, 0.0, 0.0)
    return Spread(*np.percentile(values, [50, 90, 99], method="lower").tolist())
