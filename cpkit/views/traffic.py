"""Calls and bytes of a step's collectives over all layers, by operation and group."""

from collections import defaultdict
from dataclasses import dataclass

from cpkit.model import Model
from cpkit.planner.collectives import StepCollectives


@dataclass(frozen=True, slots=True)
class Traffic:
    """calls: times that a rank enters such a collective; bytes: what one rank puts in, over all calls."""

    calls: int
    bytes: int


def step_traffic(collectives: StepCollectives, model: Model) -> dict[tuple[str, str], Traffic]:
    """Traffic of one rank in one step by (operation, group), in the order of first use."""
    calls: defaultdict[tuple[str, str], int] = defaultdict(int)
    sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for collective, num_layers in collectives.weighted(model):
        kind = collective.op, collective.group
        calls[kind] += collective.times * num_layers
        sizes[kind] += collective.bytes * num_layers
    return {kind: Traffic(calls[kind], sizes[kind]) for kind in calls}
