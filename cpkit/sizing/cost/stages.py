"""Seconds of each stage of a layer on one rank, from the amounts of its work."""

from dataclasses import dataclass

from cpkit.layers import Layer
from cpkit.sizing.cost.kernels import Kernels
from cpkit.sizing.cost.work import RankWork, RatioWork, attended_keys
from cpkit.sizing.figures import Figure
from cpkit.sizing.weights import HEAD_BYTES, ModelWeights
from cpkit.step import StepPlan
from cpkit.topology import gathered_heads

BF16_ROW_BYTES = 1152
"""A latent row of 576 values that a prefill kernel reads, made from the cache's fp8."""


NO_WORK = Figure(0.0, "counted", "no work")


class Sum:
    """Adds up figures; what is left is the total with the source of the largest part."""

    def __init__(self) -> None:
        self._seconds, self._most, self._largest = 0.0, -1.0, NO_WORK

    def add(self, figure: Figure, times: int = 1) -> None:
        """One part, so many times."""
        seconds = times * figure.value
        self._seconds += seconds
        if seconds > self._most:
            self._most, self._largest = seconds, figure

    @property
    def total(self) -> Figure:
        """All parts together."""
        return Figure(self._seconds, self._largest.kind, self._largest.source)


@dataclass(frozen=True, slots=True)
class RankStages:
    """One rank's stages."""

    kernels: Kernels
    weights: ModelWeights
    plan: StepPlan
    work: RankWork

    def layer(self, number: int, layer: Layer) -> dict[str, Figure]:
        """Stages of a layer of model.layers[number]'s kind; those without work are left out."""
        if not self.work.tokens:
            return {"project": self._roofline(0.0)}
        stages = {"project": self.project(number)}
        if layer.compress_ratio or layer.window_size:
            stages["write"] = self.write(layer)
            stages["attend"] = self.attend(layer)
        if layer.index and layer.runs_index:
            stages["index"] = self.index(layer)
        if self.merged_rows(layer):
            stages["merge"] = self.merge(layer)
        stages["output"] = self.output(number)
        stages["experts"] = self.experts()
        return stages

    def once(self) -> dict[str, Figure]:
        """What the rank does behind the layers."""
        batch, topology = self.plan.batch, self.plan.topology
        restored = batch.num_tokens * self.plan.model.hidden_size * 4 if topology.pcp > 1 else 0
        rows, head = batch.num_reqs, self.weights.head / topology.tp
        head_s = self.kernels.product(2 * rows * head, HEAD_BYTES * head, self.kernels.assumptions.gemm_share, "bf16")
        return {
            "restore": self._roofline(head_s + (self.kernels.copy(restored) if restored else 0.0)),
            "step": Figure(self.kernels.assumptions.step_s, "assumed", "scheduling and launching"),
        }

    # ---- attention -----------------------------------------------------------------------------------------------

    def project(self, number: int) -> Figure:
        """Projections before the attention, and the small kernels of a layer."""
        attention, assumed = self.weights.attention[number], self.kernels.assumptions
        weights = attention.replicated + attention.queries / self.plan.topology.tp
        hidden_bytes = 2 * self.plan.model.hidden_size * self.weights.streams
        small = self.kernels.copy(self.work.tokens * hidden_bytes * assumed.row_passes, assumed.small_kernels)
        return self._roofline(self._product(weights, launches=4) + small)

    def write(self, layer: Layer) -> Figure:
        """Cache rows of the tokens whose keys this rank may store: all of the step's, of PCP ranks gathered."""
        tokens = self.plan.padded * self.plan.topology.pcp
        row = 2 * layer.key_dim + layer.key_bytes + 2 * layer.window_dim + layer.window_bytes
        if layer.index and layer.owns_index_keys:
            row += 2 * layer.index.head_dim + layer.index.key_bytes
        return self._roofline(self.kernels.copy(tokens * row / max(layer.compress_ratio, 1), launches=2))

    def index(self, layer: Layer) -> Figure:
        """What the indexer selects from, and its selection: over DCP of the candidates of every rank."""
        assert layer.index is not None, "checked by the caller"
        topology, total, work = self.plan.topology, Sum(), self.work.ratios[layer.chunk_ratio]
        total.add(self.select(layer))
        for chunk in work.chunks:  # paged rows into a workspace, and once more where shards are gathered
            gathers = topology.pcp > 1 and topology.dcp > 1
            rows = chunk.num_keys * (2 if gathers else self._share_scored(work))
            total.add(self._roofline(self.kernels.copy(2 * layer.index.key_bytes * rows, 2 if gathers else 1)))
        if rows := self.merged_rows(layer):
            total.add(self.kernels.topk_seconds(layer.index.topk, rows, topology.dcp * layer.index.topk))
        return total.total

    def select(self, layer: Layer) -> Figure:
        """Logits and top-k alone: of decode rows over this rank's shard, of prefill rows over each chunk."""
        assert layer.index is not None, "checked by the caller"
        index, total, work = layer.index, Sum(), self.work.ratios[layer.chunk_ratio]
        decodes, kernels = self.work.decode_tokens, self.kernels
        if decodes and (held := work.decode_keys * work.local_share) >= 1:
            total.add(kernels.seconds("mqa_logits_decode", decodes, held, index.num_heads))
            alone = kernels.topk_seconds(index.topk, 1, max(work.longest_decode, 1.0), decode=True)
            total.add(max(alone, kernels.topk_seconds(index.topk, decodes, held, decode=True), key=_value))
        for chunk in work.chunks:
            keys = max(chunk.mean_keys * self._share_scored(work), 1.0)
            rows = chunk.tokens / chunk.num_runs
            total.add(kernels.seconds("mqa_logits", rows, keys, index.num_heads), chunk.num_runs)
            total.add(kernels.topk_seconds(index.topk, rows, keys), chunk.num_runs)
        return total.total

    def _share_scored(self, work: RatioWork) -> float:
        """Part of a prefill's keys that this rank scores: its shard's, or with PCP all."""
        return 1.0 if self.plan.topology.pcp > 1 else work.local_share

    def attend(self, layer: Layer) -> Figure:
        """Attention of decode and prefill rows, each with the heads and keys that it has in this world."""
        total, topology = Sum(), self.plan.topology
        own = self.plan.model.num_heads // topology.tp
        kind = "window" if layer.window_size else "sparse"
        for decode, tokens in ((True, self.work.decode_tokens), (False, self.work.prefill_tokens)):
            if not tokens:
                continue
            merged = bool(layer.compress_ratio) and topology.dcp > 1 and (decode or topology.pcp == 1)
            heads = self.merged_heads() if merged else own
            keys = attended_keys(layer, self.work, decode=decode, local=merged)
            name = f"{kind}_{'decode' if decode else 'prefill'}"
            total.add(self.kernels.seconds(name, tokens, max(keys, 1.0), self.kernels.padded_heads(name, heads)))
        if kind == "sparse":
            for chunk in self.work.ratios[layer.chunk_ratio].chunks:
                rows = chunk.num_keys * layer.chunk_ratio / layer.compress_ratio
                total.add(self._roofline(self.kernels.copy(rows * (layer.key_bytes + BF16_ROW_BYTES))))
        return total.total

    def merge(self, layer: Layer) -> Figure:
        """Partial outputs weighed before they are summed, and read once more behind."""
        rows, heads = self.merged_rows(layer), self.merged_heads()
        return self._roofline(self.kernels.copy(3 * 4 * rows * heads * layer.value_dim, launches=3))

    def merged_rows(self, layer: Layer) -> int:
        """Query tokens of the rank whose outputs are merged over its DCP group."""
        topology = self.plan.topology
        if topology.dcp == 1 or not layer.compress_ratio:
            return 0
        return self.work.decode_tokens if topology.pcp > 1 else self.work.tokens

    def merged_heads(self) -> int:
        """Heads that a shard is attended with."""
        topology, heads = self.plan.topology, self.plan.model.num_heads
        return gathered_heads(heads // topology.tp, tp=topology.tp, pcp=topology.pcp, dcp=topology.dcp)

    def output(self, number: int) -> Figure:
        """Output projection of the rank's heads."""
        return self._roofline(self._product(self.weights.attention[number].output / self.plan.topology.tp, launches=2))

    # ---- feed-forward --------------------------------------------------------------------------------------------

    def experts(self) -> Figure:
        """Feed-forward of an average layer: the dense ones of a model count with their share of its layers."""
        weights, topology = self.weights, self.plan.topology
        num_layers = weights.num_dense + weights.num_moe
        seconds = self._product(weights.dense / topology.tp, launches=2) * weights.num_dense
        if weights.num_moe:
            seconds += self._experts() * weights.num_moe
        return self._roofline(seconds / num_layers)

    def _experts(self) -> float:
        """Experts of one layer: this rank's, of all tokens of the replica, and its part of the shared ones."""
        weights, topology, assumed = self.weights, self.plan.topology, self.kernels.assumptions
        tokens = int(self.plan.partition.num_tokens.sum())
        held = -(-weights.num_experts // topology.replica_size)
        flops = 2 * tokens * weights.active * weights.expert / topology.replica_size
        touched = held * (1 - (1 - weights.active / weights.num_experts) ** tokens)
        num_bytes = touched * weights.expert * weights.expert_bytes.value
        dtype = "fp4" if weights.expert_bytes.value < 1 else "fp8" if weights.expert_bytes.value == 1 else "bf16"
        routed = self.kernels.product(flops, num_bytes, assumed.expert_share, dtype, launches=4)
        return routed + self._product(weights.shared / topology.tp + weights.router, launches=2)

    def _product(self, weights: float, launches: int) -> float:
        """Products of all the rank's tokens with so many weights."""
        size = self.weights.weight_bytes.value
        flops, share = 2 * self.work.tokens * weights, self.kernels.assumptions.gemm_share
        return self.kernels.product(flops, weights * size, share, "fp8" if size == 1 else "bf16", launches)

    def _roofline(self, seconds: float) -> Figure:
        return Figure(seconds, "hardware", self.kernels.peaks_source)


def _value(figure: Figure) -> float:
    return figure.value
