"""From a step's plan to its cost: the amounts of each rank, timed stage by stage on a chip.

StepPlan -> rank_work -> stages of each kind of layer -> StepCost
            collectives + those of projections and experts -> seconds on the world's links
            budget.num_speculative_tokens -> passes that make drafts
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
from cpkit.sizing.cost.drafts import later_drafts
from cpkit.sizing.cost.engines import EngineTime, time_of_engine
from cpkit.sizing.cost.kernels import Kernels
from cpkit.sizing.cost.links import Links
from cpkit.sizing.cost.stages import RankStages
from cpkit.sizing.cost.step import STAGE_OF, STAGES, CollectiveCost, LayerCost, StageCost, StepCost
from cpkit.sizing.cost.tables import cpkit_tables
from cpkit.sizing.cost.work import rank_work
from cpkit.sizing.deployment import draft_layer, replicates_index
from cpkit.sizing.figures import Figure
from cpkit.sizing.weights import ModelWeights
from cpkit.step import StepPlan
from cpkit.topology import Topology


@dataclass(frozen=True)
class CostModel:
    """Costs of one model's steps on one kind of chip in one world. Raises ConfigError for pipeline stages.

    weights: of the same model. engine: whose layers are timed, one of sizing.deployment.ENGINES; None: the vendor's
    kernels alone.
    """

    model: Model
    weights: ModelWeights
    topology: Topology
    chip: Chip
    assumptions: Assumptions = Assumptions()  # noqa: RUF009  # frozen
    engine: str | None = None

    def __post_init__(self) -> None:
        if self.topology.pp > 1:
            raise ConfigError(f"pp={self.topology.pp}: the cost model has no pipeline stages; use pp=1")
        time_of_engine(self.engine)

    @cached_property
    def kernels(self) -> Kernels:
        """Kernels of the chip: cpkit's own where it is the engine and they were measured there."""
        own = cpkit_tables(self.chip.name) if self.engine == "cpkit" else {}
        return Kernels(self.chip, self.assumptions, own)

    @cached_property
    def engine_time(self) -> EngineTime | None:
        """What the engine's layers take beside their kernels."""
        return time_of_engine(self.engine)

    @property
    def replicates_index(self) -> bool:
        """Every DCP rank keeps all indexer keys."""
        return replicates_index(self.engine, self.topology.dcp)

    @cached_property
    def links(self) -> Links:
        """Links of the world."""
        return Links(self.chip, self.topology)

    def step_cost(self, plan: StepPlan) -> StepCost:
        """Cost of a planned step on the ranks that the plan holds: those that are not in it count as no slower."""
        assert plan.topology == self.topology, "the plan is of another world"
        stages = self._stages(plan)
        layers = [
            self._layer_cost(
                layer.kind,
                layer.num_layers,
                _columns(STAGES, [rank.layer(number, layer) for rank in stages]),
                tuple(self._collectives(plan, number, layer)),
            )
            for number, layer in enumerate(plan.model.layers)
        ]
        once = _columns(("restore", "step"), [rank.once() for rank in stages])
        behind = self._layer_cost("step", 1, once, tuple(map(self._timed, plan.collectives.step)))
        return StepCost(tuple(rank.rank for rank in plan.ranks), (*layers, *self._drafts(plan, stages)), behind)

    def _stages(self, plan: StepPlan) -> list[RankStages]:
        """Stages of each rank of the plan; ranks of one place do the same work."""
        found: dict[tuple[int, int], RankStages] = {}
        for rank in plan.ranks:
            place = rank.pcp_rank, rank.dcp_rank
            if place not in found:
                work = rank_work(plan, rank)
                found[place] = RankStages(
                    self.kernels, self.weights, plan, work, self.engine_time, self.replicates_index
                )
        return [found[rank.pcp_rank, rank.dcp_rank] for rank in plan.ranks]

    def _drafts(self, plan: StepPlan, stages: list[RankStages]) -> Iterator[LayerCost]:
        """The passes of a draft module."""
        if not plan.budget.num_speculative_tokens:
            return
        yield self._draft_pass("first draft", 1, plan, stages)
        later = later_drafts(plan)
        if later is not None:
            yield self._draft_pass("later drafts", plan.budget.num_speculative_tokens - 1, later, self._stages(later))

    def _draft_pass(self, kind: str, times: int, plan: StepPlan, stages: list[RankStages]) -> LayerCost:
        number = draft_layer(plan.model)
        layer = plan.model.layers[number]
        columns = _columns((*STAGES, "restore"), [rank.draft(number, layer) for rank in stages])
        return self._layer_cost(kind, times, columns, tuple(self._collectives(plan, number, layer)))

    def _layer_cost(
        self, kind: str, num_layers: int, stages: tuple[StageCost, ...], collectives: tuple[CollectiveCost, ...]
    ) -> LayerCost:
        return LayerCost(kind, num_layers, stages, collectives, self.assumptions.overlap)

    def _collectives(self, plan: StepPlan, number: int, layer: Layer) -> Iterator[CollectiveCost]:
        """The plan's collectives of a layer, then those of its projections and experts."""
        for collective in plan.collectives.layers[number]:
            if not (self.replicates_index and collective.what == "candidates"):
                yield self._timed(collective)
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
