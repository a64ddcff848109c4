"""What a step costs on a chip: seconds of every stage on every rank, and of every collective, each with its source.

One layer of a kind, its stages in the order of the rank program and the collectives that each waits for:

    stage      computes                                  waits for
    project    q, k and index projections, norms
    write      rows of the caches                        kv_latent, index_key, swa_row, slots     (pcp)
    index      logits and top-k                          index_keys, candidates                   (dcp)
    attend     sparse attention                          query_heads, latent_rows                 (dcp, tp)
    merge      partial outputs of DCP ranks              lse, outputs or partials, output_heads   (dcp, pcp)
    output     output projection                         attention_out                            (tp)
    experts    feed-forward                              expert_rows, expert_out                  (pcp, tp)
    engine     what an engine's layer takes beside

Ranks meet in every layer: it takes as long as its slowest rank, and the others wait.
"""

from collections import defaultdict
from dataclasses import dataclass

from cpkit.planner.collectives import Collective
from cpkit.sizing.figures import Figure

STAGES = ("project", "write", "index", "attend", "merge", "output", "experts", "engine")
"""Of a layer."""

STEP_STAGES = ("restore", "step")
"""Of a step, behind its layers: rows back in batch order and the output head; what no layer does."""

WAITS = {
    "write": ("kv_latent", "index_key", "swa_row", "slots"),
    "index": ("index_keys", "candidates"),
    "attend": ("query_heads", "latent_rows"),
    "merge": ("lse", "outputs", "partials", "output_heads"),
    "output": ("attention_out",),
    "experts": ("expert_rows", "expert_out"),
    "restore": ("hidden_rows",),
}
STAGE_OF = {what: stage for stage, kinds in WAITS.items() for what in kinds}
"""The stage that waits for each collective, by what travels."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """seconds: of one layer, one entry a rank in StepCost.ranks' order; source: of the slowest rank's."""

    name: str
    seconds: tuple[float, ...]
    source: Figure


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """seconds: of one layer's calls (collective.times of them); stage: what waits for its data."""

    collective: Collective
    stage: str
    seconds: float
    source: Figure


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer of a kind, of which a step has num_layers; or, once, what a step does behind its layers.

    overlap: share of the collectives that may run behind computation.
    """

    kind: str
    num_layers: int
    stages: tuple[StageCost, ...]
    collectives: tuple[CollectiveCost, ...]
    overlap: float = 0.0

    def compute_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes in one such layer."""
        return tuple(map(sum, zip(*(stage.seconds for stage in self.stages), strict=True)))

    def collective_s(self) -> float:
        """Seconds of one such layer's collectives, one after another."""
        return sum(cost.seconds for cost in self.collectives)

    def seconds(self) -> float:
        """Seconds of one such layer: of its slowest rank, and of the collectives that nothing hides."""
        compute, collective = max(self.compute_s()), self.collective_s()
        return compute + collective - min(self.overlap * collective, compute)


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step's cost on some ranks.

    ranks: in the world. layers: one entry a kind of layer, in model.layers' order, then the passes that make drafts.
    once: what is behind the layers.
    """

    ranks: tuple[int, ...]
    layers: tuple[LayerCost, ...]
    once: LayerCost

    def seconds(self) -> float:
        """Duration of the step."""
        return sum(layer.num_layers * layer.seconds() for layer in (*self.layers, self.once))

    def stage_s(self) -> dict[str, tuple[float, ...]]:
        """Seconds by stage over all layers, one entry a rank."""
        total: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(self.ranks))
        for layer in (*self.layers, self.once):
            for stage in layer.stages:
                sums = total[stage.name]
                for at, seconds in enumerate(stage.seconds):
                    sums[at] += layer.num_layers * seconds
        return {name: tuple(sums) for name, sums in total.items()}

    def collective_s(self) -> dict[str, float]:
        """Seconds by what travels, over all layers."""
        total: defaultdict[str, float] = defaultdict(float)
        for layer in (*self.layers, self.once):
            for cost in layer.collectives:
                total[cost.collective.what] += layer.num_layers * cost.seconds
        return dict(total)

    def idle_s(self) -> tuple[float, ...]:
        """Seconds that each rank waits for slower ones, over all layers."""
        idle = [0.0] * len(self.ranks)
        for layer in (*self.layers, self.once):
            compute = layer.compute_s()
            longest = max(compute)
            for at, seconds in enumerate(compute):
                idle[at] += layer.num_layers * (longest - seconds)
        return tuple(idle)

    def seconds_by_source(self) -> dict[tuple[str, str], float]:
        """Seconds by (stage or what travels, kind of the source): of the slowest ranks' stages and of collectives."""
        total: defaultdict[tuple[str, str], float] = defaultdict(float)
        for layer in (*self.layers, self.once):
            for stage in layer.stages:
                for part in stage.source.by_kind:
                    total[stage.name, part.kind] += layer.num_layers * part.value
            for cost in layer.collectives:
                total[cost.collective.what, cost.source.kind] += layer.num_layers * cost.seconds
        return dict(total)

    def seconds_by_kind(self) -> dict[str, float]:
        """The same by the kind of the source alone (a Figure's)."""
        total: defaultdict[str, float] = defaultdict(float)
        for (_, kind), seconds in self.seconds_by_source().items():
            total[kind] += seconds
        return dict(total)
