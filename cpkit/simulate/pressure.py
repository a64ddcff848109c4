"""How full a replay's engine was, weighed by time: KV blocks held, requests running and waiting."""

from dataclasses import dataclass, field

import numpy as np

from cpkit.workload.scheduler import ScheduledStep


@dataclass(frozen=True, slots=True)
class Level:
    """A quantity over the seconds of a replay: its mean, what it stayed at or below for 99 % of them, its most."""

    mean: float
    p99: float
    most: float


@dataclass(slots=True)
class Pressure:
    """Steps so far: seconds of each, and what was held, ran and waited in it."""

    seconds: list[float] = field(default_factory=list)
    held_blocks: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def add(self, step: ScheduledStep) -> None:
        """One more step."""
        self.seconds.append(step.duration_s)
        self.held_blocks.append(step.num_held_blocks)
        self.running.append(step.batch.num_reqs)
        self.waiting.append(step.num_waiting)

    @property
    def busy_s(self) -> float:
        """Seconds in which a step ran."""
        return float(sum(self.seconds))

    def level(self, name: str) -> Level:
        """Level of held_blocks, running or waiting; zeros without steps."""
        values = np.array(getattr(self, name), np.float64)
        seconds = np.array(self.seconds)
        if not seconds.sum():
            return Level(0.0, 0.0, 0.0)
        order = np.argsort(values, kind="stable")
        passed = np.cumsum(seconds[order]) / seconds.sum()
        at = min(int(np.searchsorted(passed, 0.99)), len(values) - 1)
        return Level(float(values @ seconds / seconds.sum()), float(values[order][at]), float(values.max()))
