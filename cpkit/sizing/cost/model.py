"""From a step's plan to its cost: the amounts of each rank, timed stage by stage on a chip.

StepPlan -> rank_work -> stages of each kind of layer -> StepCost
            collectives + those of projections and experts -> seconds on the world's links
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from cpkit.errors import ConfigError
from cpkit.layers import Layer
from cpkit.model import Model
from cpkit.planner.collectives import Collective
from cpkit.sizing.chips import Chip
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.kernels import Kernels
from cpkit.sizing.cost.links import Links
from cpkit.sizing.cost.stages import RankStages
from cpkit.sizing.cost.step import STAGE_OF, STAGES, CollectiveCost, LayerCost, StageCost, StepCost
from cpkit.sizing.cost.work import RankWork, rank_work
from cpkit.sizing.figures import Figure
from cpkit.sizing.weights import ModelWeights
from cpkit.step import StepPlan
from cpkit.topology import Topology


@dataclass(frozen=True)
class CostModel:
    """Costs of one model's steps on one kind of chip in one world. Raises ConfigError for pipeline stages.

    weights: of the same model.
    """

    model: Model
    weights: ModelWeights
    topology: Topology
    chip: Chip
    assumptions: Assumptions = Assumptions()  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        if self.topology.pp > 1:
            raise ConfigError(f"pp={self.topology.pp}: the cost model has no pipeline stages; use pp=1")

    @cached_property
    def kernels(self) -> Kernels:
        """Kernels of the chip."""
        return Kernels(self.chip, self.assumptions)

    @cached_property
    def links(self) -> Links:
        """Links of the world."""
        return Links(self.chip, self.topology)

    def step_cost(self, plan: StepPlan) -> StepCost:
        """Cost of a planned step on the ranks that the plan holds: those that are not in it count as no slower."""
        assert plan.topology == self.topology, "the plan is of another world"
        works: dict[tuple[int, int], RankWork] = {}
        stages: dict[tuple[int, int], RankStages] = {}
        for rank in plan.ranks:
            place = rank.pcp_rank, rank.dcp_rank
            if place not in works:
                works[place] = rank_work(plan, rank)
                stages[place] = RankStages(self.kernels, self.weights, plan, works[place])
        places = [(rank.pcp_rank, rank.dcp_rank) for rank in plan.ranks]
        layers = []
        for number, layer in enumerate(plan.model.layers):
            found = {place: stages[place].layer(number, layer) for place in stages}
            layers.append(
                LayerCost(
                    kind=layer.kind,
                    num_layers=layer.num_layers,
                    stages=_columns(STAGES, [found[place] for place in places]),
                    collectives=tuple(self._collectives(plan, number, layer)),
                    overlap=self.assumptions.overlap,
                )
            )
        once = {place: stages[place].once() for place in stages}
        behind = LayerCost(
            kind="step",
            num_layers=1,
            stages=_columns(("restore", "step"), [once[place] for place in places]),
            collectives=tuple(map(self._timed, plan.collectives.step)),
            overlap=self.assumptions.overlap,
        )
        return StepCost(tuple(rank.rank for rank in plan.ranks), tuple(layers), behind)

    def _collectives(self, plan: StepPlan, number: int, layer: Layer) -> Iterator[CollectiveCost]:
        """The plan's collectives of a layer, then those of its projections and experts."""
        yield from map(self._timed, plan.collectives.layers[number])
        hidden = plan.padded * plan.model.hidden_size
        if not hidden:
            return
        topology = self.topology
        if topology.tp > 1:
            yield self._timed(Collective("all_reduce", "tp", "attention_out", "bfloat16", hidden))
        if topology.pcp > 1 and self.weights.num_moe:
            yield self._timed(Collective("all_gather", "pcp", "expert_rows", "bfloat16", hidden))
        if topology.tp > 1:
            yield self._timed(Collective("all_reduce", "tp", "expert_out", "bfloat16", hidden))
        if topology.pcp > 1 and self.weights.num_moe:
            yield self._timed(Collective("reduce_scatter", "pcp", "expert_out", "bfloat16", hidden * topology.pcp))

    def _timed(self, collective: Collective) -> CollectiveCost:
        one = self.links.seconds(collective.op, collective.group, collective.bytes / collective.times)
        return CollectiveCost(collective, STAGE_OF[collective.what], collective.times * one.value, one)


def _columns(names: tuple[str, ...], ranks: list[dict[str, Figure]]) -> tuple[StageCost, ...]:
    """Stages that any rank has, with the seconds of each rank; the source is that of the slowest."""
    found = []
    for name in names:
        figures = [rank[name] for rank in ranks if name in rank]
        if figures:
            seconds = tuple(rank[name].value if name in rank else 0.0 for rank in ranks)
            found.append(StageCost(name, seconds, max(figures, key=lambda figure: figure.value)))
    return tuple(found)
