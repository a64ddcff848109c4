"""How full a replay's engine was, step by step, and the same over columns of time for a picture."""

from dataclasses import dataclass, field

import numpy as np

from cpkit.arrays import FloatArray
from cpkit.workload.scheduler import ScheduledStep


@dataclass(slots=True)
class Levels:
    """One entry a step: when it began, KV blocks held, requests running and waiting."""

    time_s: list[float] = field(default_factory=list)
    held_blocks: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def add(self, step: ScheduledStep) -> None:
        """One more step."""
        self.time_s.append(step.time_s)
        self.held_blocks.append(step.num_held_blocks)
        self.running.append(step.batch.num_reqs)
        self.waiting.append(step.num_waiting)

    def columns(self, name: str, num: int, end_s: float) -> FloatArray:
        """[num] the most of a quantity in each of num equal spans of [0, end_s]; one without a step keeps the last.

        steps at 0, 1, 7 with 5, 9, 2; num=4, end_s=8:    9 9 9 2
        """
        values: FloatArray = np.array(getattr(self, name), np.float64)
        if not len(values):
            return np.zeros(num)
        column = np.minimum((np.array(self.time_s) / (end_s or 1.0) * num).astype(np.int64), num - 1)
        most = np.full(num, -1.0)
        np.maximum.at(most, column, values)
        last = 0.0
        for at in np.flatnonzero(most < 0).tolist():
            most[at] = last if at == 0 else most[at - 1]
        return most
