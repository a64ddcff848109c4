"""A replay on the cost model's clock as text: waits, throughput, pressure, and where the seconds went."""

from collections.abc import Mapping

from cpkit.report.table import indent, share, table
from cpkit.simulate.cost import ReplayCost, Spread

MAX_IDLE = 8
"""Ranks whose idle time is listed; the others lie between the least and the most."""


def cost_report(cost: ReplayCost) -> list[str]:
    """Lines of the section."""
    return [
        f"Cost model, {cost.chip}{f', layers of {cost.engine}' if cost.engine else ''}: an estimate, from "
        f"{kinds_text(cost.kinds)}",
        *indent(_waits(cost)),
        *indent(_rates(cost)),
        "",
        "Where the steps' seconds go",
        *indent(_seconds(cost)),
        *indent(_idle(cost.idle)),
    ]


def kinds_text(kinds: Mapping[str, float]) -> str:
    """Shares by source.  61.0% measured, 39.0% hardware; one alone: measured"""
    total = sum(kinds.values())
    ordered = sorted(((kind, seconds) for kind, seconds in kinds.items() if seconds), key=lambda item: -item[1])
    if len(ordered) == 1:
        return ordered[0][0]
    return ", ".join(f"{share(seconds, total)} {kind}" for kind, seconds in ordered)


def duration(seconds: float) -> str:
    """Seconds as people read waits.  0.0421 -> 42.1 ms, 3.2 -> 3.20 s, 812 -> 812 s"""
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _waits(cost: ReplayCost) -> list[str]:
    rows = [
        ["time to first token", *_spread(cost.ttft_s)],
        ["  of it in the queue", *_spread(cost.queue_s)],
        ["time per output token", *_spread(cost.tpot_s)],
    ]
    return table(["", "p50", "p90", "p99"], rows, "lrrr")


def _spread(spread: Spread) -> list[str]:
    return [duration(value) for value in (spread.p50, spread.p90, spread.p99)]


def _rates(cost: ReplayCost) -> list[str]:
    kv = [share(value, 1.0) for value in (cost.kv.mean, cost.kv.p99, cost.kv.most)]
    rows = [
        ["KV blocks held", *kv],
        *(
            [f"requests {name}", f"{level.mean:,.1f}", f"{level.p99:,.0f}", f"{level.most:,.0f}"]
            for name, level in (("running", cost.running), ("waiting", cost.waiting))
        ),
    ]
    return [
        *table(["weighed by time", "mean", "p99", "most"], rows, "lrrr"),
        f"{cost.prompt_tokens_s:,.0f} prompt and {cost.output_tokens_s:,.0f} output tokens/s; {cost.per_gpu:,.0f} a "
        f"GPU; steps run {share(cost.busy, 1.0)} of the time",
    ]


def _seconds(cost: ReplayCost) -> list[str]:
    total = sum(cost.stages.values()) + sum(cost.collectives.values())
    parts = [(name, "compute", seconds) for name, seconds in cost.stages.items()]
    parts += [(name, "collective", seconds) for name, seconds in cost.collectives.items()]
    ordered = sorted(parts, key=lambda part: -part[2])
    rows = [
        [name, kind, f"{seconds:,.1f} s", share(seconds, total), kinds_text(cost.sources[name])]
        for name, kind, seconds in ordered
        if seconds
    ]
    return table(["", "", "seconds", "share", "from"], rows, "llrrl")


def _idle(idle: Mapping[int, float]) -> list[str]:
    if len(idle) < 2:
        return []
    if len(idle) <= MAX_IDLE:
        listed = ", ".join(f"rank {rank} {share(part, 1.0)}" for rank, part in idle.items())
        return [f"waiting for slower ranks: {listed}"]
    least, most = min(idle, key=idle.__getitem__), max(idle, key=idle.__getitem__)
    return [
        f"waiting for slower ranks: from {share(idle[least], 1.0)} (rank {least}) to {share(idle[most], 1.0)} "
        f"(rank {most}) of {len(idle)} PCP places"
    ]
