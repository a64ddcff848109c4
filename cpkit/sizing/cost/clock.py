"""The cost model as a replay's clock: a batch's duration, and where the seconds went.

planned    every batch is planned for the ranks that differ, one for each PCP rank, and its plan is costed
quick      batches of decodes alone are read from a grid of planned ones (requests x mean context); the others are
           planned for the first PCP rank, and under contiguous parts for the last: one of them has the most work
"""

import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from cpkit.arrays import FloatArray
from cpkit.batch import Batch
from cpkit.settings import StepSettings
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.cost.step import StepCost

GRID_CONTEXTS = 12
"""Contexts of the decode grid, 64 tokens apart at first, then growing alike up to the longest request."""


@dataclass(slots=True)
class CostTotals:
    """Seconds of all steps so far.

    stages: of the slowest rank, by stage; collectives: by what travels; sources: both by (stage or what travels, kind
    of the source). idle, compute: by rank of PlannedClock.ranks.
    """

    seconds: float = 0.0
    stages: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    collectives: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sources: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    idle: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    compute: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, cost: StepCost) -> None:
        """One more step."""
        self.seconds += cost.seconds()
        for name, by_rank in cost.stage_s().items():
            self.stages[name] += max(by_rank)
            for rank, seconds in zip(cost.ranks, by_rank, strict=True):
                self.compute[rank] += seconds
        for what, seconds in cost.collective_s().items():
            self.collectives[what] += seconds
        for source, seconds in cost.seconds_by_source().items():
            self.sources[source] += seconds
        for rank, seconds in zip(cost.ranks, cost.idle_s(), strict=True):
            self.idle[rank] += seconds


class PlannedClock:
    """Every step planned and costed, on one rank of each PCP place: the ranks of a place do the same work."""

    def __init__(self, model: CostModel, settings: StepSettings) -> None:
        self.model, self._settings = model, settings
        self.ranks = tuple(range(0, settings.topology.replica_size, settings.topology.tp))
        self.totals = CostTotals()

    def step_seconds(self, batch: Batch) -> float:
        """Duration of a step, added to the totals."""
        cost = self.model.step_cost(self._settings.plan(batch, self.ranks))
        self.totals.add(cost)
        return cost.seconds()


class QuickClock:
    """Durations alone, fast enough for thousands of steps of many worlds."""

    def __init__(self, model: CostModel, settings: StepSettings, longest: int) -> None:
        self._model, self._settings = model, settings
        topology = settings.topology
        # rank 0 has as many decodes as any rank, and as long a part of a prompt but under contiguous parts
        last = topology.replica_size - topology.tp
        self._ranks = [0, last] if settings.partition == "contiguous" and last else [0]
        self._grid = DecodeGrid(model, settings, longest)

    def step_seconds(self, batch: Batch) -> float:
        """Duration of a step, or of a stride of steps of decodes alone: as many as a request has tokens."""
        if batch.num_decodes == batch.num_reqs and (steps := self._num_steps(batch)):
            context = float(batch.seq_lens.mean()) - (steps - 1) / 2
            return steps * self._grid.seconds(batch.num_reqs, context)
        return self._model.step_cost(self._settings.plan(batch, self._ranks)).seconds()

    def _num_steps(self, batch: Batch) -> int:
        """Steps that a batch of decodes stands for; 0: its rows differ, and it is one that must be planned."""
        query_len = int(batch.query_lens[0])
        if (batch.query_lens != query_len).any():
            return 0
        if self._grid.query_len == 1:
            return query_len
        return int(query_len == self._grid.query_len)


class DecodeGrid:
    """Durations of steps of decodes of one context length, read between points of (requests, context).

    longest: tokens of the longest request. A point is planned when it is first needed.
    """

    def __init__(self, model: CostModel, settings: StepSettings, longest: int) -> None:
        self._model, self._settings = model, settings
        budget, pcp = settings.budget, settings.topology.pcp
        self.query_len = budget.decode_threshold
        most = min(budget.max_num_seqs, budget.max_num_batched_tokens // self.query_len)
        # decodes dealt out over PCP ranks cost alike until one more comes to each of them
        doubling = [pcp * 2**i for i in range(20) if pcp * 2**i < most]
        self._requests = sorted({*range(1, min(pcp, most) + 1), *doubling, most})
        first = self.query_len + 64
        growth: FloatArray = np.geomspace(first, max(longest, first + 1), GRID_CONTEXTS)
        self._contexts = [math.ceil(context) for context in growth.tolist()]
        self._points: dict[tuple[int, int], float] = {}

    def seconds(self, num_reqs: int, context: float) -> float:
        """Duration of num_reqs decodes whose contexts are so long on average."""
        row, row_share = _between(self._requests, num_reqs)
        column, column_share = _between(self._contexts, context)
        low = self._along(row, column, column_share)
        if not row_share:
            return low
        return low + row_share * (self._along(row + 1, column, column_share) - low)

    def _along(self, row: int, column: int, share: float) -> float:
        """Between two contexts of one number of requests."""
        low = self._point(row, column)
        return low + share * (self._point(row, column + 1) - low) if share else low

    def _point(self, row: int, column: int) -> float:
        point = self._points.get((row, column))
        if point is None:
            num_reqs, context = self._requests[row], self._contexts[column]
            prompt = context - self.query_len
            batch = Batch.from_lens([context] * num_reqs, [self.query_len] * num_reqs, [prompt] * num_reqs)
            point = self._points[row, column] = self._model.step_cost(self._settings.plan(batch, 0)).seconds()
        return point


def _between(axis: list[int], at: float) -> tuple[int, float]:
    """Index of the point at or before a place, and how far it lies towards the next one; ends are kept to."""
    if at <= axis[0]:
        return 0, 0.0
    if at >= axis[-1]:
        return len(axis) - 1, 0.0
    right = bisect_left(axis, at)
    return right - 1, (at - axis[right - 1]) / (axis[right] - axis[right - 1])
