"""Where the stages and collectives of a step lie in time, so that a layer takes as long as the cost model says.

The layers of one kind are folded into one: each of its slices stands for that stage, or collective, of all of them.
In a picture ranks meet at every collective, in the cost model once a layer; where different ranks are slowest in
different stages the slices are shrunk alike, to fit. Collectives that hide behind computation begin before the stage
that waits for them is reached.

    rank 0 compute   project........      index........ idle attend....
    rank 1 compute   project.....  idle   index.............. attend....
    communication                   keys..
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cpkit.sizing.cost.step import STAGES, STEP_STAGES, CollectiveCost, LayerCost, StageCost


@dataclass(frozen=True, slots=True)
class Placed:
    """A stage or a collective. start, stop: seconds from the beginning of the folded layers; of a stage, its window:
    a rank computes from start on, shrink * num_layers times its seconds.
    """

    cost: StageCost | CollectiveCost
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class FoldedLayers:
    """Layers of one kind. stages, collectives: each in order and without overlaps. seconds: of all the layers."""

    layer: LayerCost
    shrink: float
    stages: tuple[Placed, ...]
    collectives: tuple[Placed, ...]
    seconds: float


def fold_layers(layer: LayerCost) -> FoldedLayers:
    """Place the stages and collectives of all layers of a kind."""
    slowest = sum(max(stage.seconds) for stage in layer.stages)
    compute, total = (max(layer.compute_s()) if layer.stages else 0.0), layer.collective_s()
    shrink = compute / slowest if slowest else 1.0
    shown = 1 - min(layer.overlap * total, compute) / total if total else 1.0  # share that nothing hides
    now, stages, waited = 0.0, [], []
    for stage, collectives in _in_order(layer):
        for one in collectives:
            now += layer.num_layers * shown * one.seconds
            waited.append((one, now))
        if stage is not None:
            stop = now + layer.num_layers * shrink * max(stage.seconds)
            stages.append(Placed(stage, now, stop))
            now = stop
    return FoldedLayers(layer, shrink, tuple(stages), tuple(_place(waited, layer.num_layers)), now)


def _in_order(layer: LayerCost) -> Iterator[tuple[StageCost | None, list[CollectiveCost]]]:
    """Each stage with the collectives that it waits for, in the order of the rank program."""
    stages = {stage.name: stage for stage in layer.stages}
    for name in (*STAGES, *STEP_STAGES):
        yield stages.get(name), [cost for cost in layer.collectives if cost.stage == name]


def _place(waited: list[tuple[CollectiveCost, float]], num_layers: int) -> list[Placed]:
    """Collectives one after another, each done by the time it is waited for where there is room before it."""
    starts = []
    behind = float("inf")
    for one, needed in reversed(waited):
        behind = min(needed, behind) - num_layers * one.seconds
        starts.append(behind)
    placed, now = [], 0.0
    for (one, _), start in zip(waited, reversed(starts), strict=True):
        now = max(start, now)
        placed.append(Placed(one, now, now + num_layers * one.seconds))
        now = placed[-1].stop
    return placed
