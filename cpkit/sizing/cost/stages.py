"""Seconds of each stage of a layer on one rank, from the amounts of its work."""

from collections.abc import Iterator
from dataclasses import dataclass

from cpkit.layers import Layer
from cpkit.planner.collectives import CANDIDATE_BYTES
from cpkit.sizing.cost.engines import EngineTime
from cpkit.sizing.cost.kernels import Kernels
from cpkit.sizing.cost.work import RankWork, RatioWork, attended_keys
from cpkit.sizing.figures import Figure, add_up
from cpkit.sizing.weights import HEAD_BYTES, ModelWeights
from cpkit.step import StepPlan
from cpkit.topology import gathered_heads

SECTOR_BYTES = 32
"""Read where one value is wanted."""
BF16_ROW_BYTES = 1152
"""A latent row of 576 values that a prefill kernel reads, made from the cache's fp8."""


@dataclass(frozen=True, slots=True)
class RankStages:
    """One rank's stages.

    engine_time: what an engine's layers take beside their kernels, None for none. replicates_index: DCP ranks keep all
    indexer keys each, and exchange no candidates.
    """

    kernels: Kernels
    weights: ModelWeights
    plan: StepPlan
    work: RankWork
    engine_time: EngineTime | None = None
    replicates_index: bool = False

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
        if self.engine_time is not None:
            stages["engine"] = self.engine_time.seconds(self.work.decode_tokens)
        return stages

    def draft(self, number: int, layer: Layer) -> dict[str, Figure]:
        """One pass of a draft module: a layer, the product that joins hidden rows and embeddings, the output head."""
        stages, hidden = self.layer(number, layer), self.plan.model.hidden_size
        joined = self._product(2 * hidden * hidden, launches=3)
        return {
            **stages,
            "project": add_up([stages["project"], self._roofline(joined)]),
            "restore": self._roofline(self._head(self.plan.batch.num_reqs)),
        }

    def once(self) -> dict[str, Figure]:
        """What the rank does behind the layers."""
        batch, topology = self.plan.batch, self.plan.topology
        restored = batch.num_tokens * self.plan.model.hidden_size * 4 if topology.pcp > 1 else 0
        rows = int(batch.query_start_loc[batch.num_decodes]) + batch.num_reqs - batch.num_decodes
        return {
            "restore": self._roofline(self._head(rows) + (self.kernels.copy(restored) if restored else 0.0)),
            "step": Figure(self.kernels.assumptions.step_s, "assumed", "scheduling and launching"),
        }

    def _head(self, rows: int) -> float:
        """Output head of so many rows: of every token of a decode, and of the last one of a prefill."""
        head = self.weights.head / self.plan.topology.tp
        return self.kernels.product(2 * rows * head, HEAD_BYTES * head, self.kernels.assumptions.gemm_share, "bf16")

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
        """What the indexer selects from, and its selection."""
        return add_up(self.index_parts(layer).values())

    def index_parts(self, layer: Layer) -> dict[str, Figure]:
        """Paged rows into a workspace, logits, top-k, and over DCP the selection among the candidates of every rank."""
        assert layer.index is not None, "checked by the caller"
        topology, work = self.plan.topology, self.work.ratios[layer.chunk_ratio]
        gathers = topology.pcp > 1 and topology.dcp > 1  # rows are read once more where shards are gathered
        copies = [
            self.kernels.copy(
                2 * layer.index.key_bytes * chunk.num_keys * (2 if gathers else self._share_scored(work)), 1 + gathers
            )
            for chunk in work.chunks
        ]
        parts = {"keys": self._roofline(sum(copies))} if copies else {}
        kernels = [*self._select_decodes(layer), *self._select_prefills(layer)]
        if kernels:
            parts["logits"], parts["topk"] = map(add_up, zip(*kernels, strict=True))
        if (rows := self.merged_rows(layer)) and not self.replicates_index:
            parts["exchange"] = self._exchange(rows, layer.index.topk)
        return parts

    def _exchange(self, rows: int, k: int) -> Figure:
        """Candidates packed, and of those of every rank the best: what is read and written, and the selection."""
        dcp = self.plan.topology.dcp
        packed = rows * k * (SECTOR_BYTES + CANDIDATE_BYTES)  # a selected logit lies in a sector of its own
        chosen = rows * k * (dcp * CANDIDATE_BYTES + CANDIDATE_BYTES)
        best = self.kernels.topk_seconds(k, rows, dcp * k)
        return add_up([best, self._roofline(self.kernels.copy(packed + chosen, launches=1))])

    def _select_decodes(self, layer: Layer) -> Iterator[tuple[Figure, Figure]]:
        """Logits and top-k of decode rows over the keys that this rank keeps."""
        assert layer.index is not None, "checked by the caller"
        index, work = layer.index, self.work.ratios[layer.chunk_ratio]
        decodes, reads, kernels = self.work.decode_tokens, self.work.decode_reads, self.kernels
        held, longest = work.decode_keys * work.local_share, work.longest_decode
        if self.replicates_index and work.local_share:
            held, longest = held / work.local_share, longest / work.local_share
        if not decodes or held < 1:
            return
        logits = kernels.seconds("mqa_logits_decode", reads, held, index.num_heads)
        if reads < decodes:
            logits = Figure(logits.value, "calibrated", f"{logits.source}; two tokens of a request read its keys once")
        alone = kernels.topk_seconds(index.topk, 1, max(longest, 1.0), decode=True)
        yield logits, max(alone, kernels.topk_seconds(index.topk, decodes, held, decode=True), key=_value)

    def _select_prefills(self, layer: Layer) -> Iterator[tuple[Figure, Figure]]:
        """The same of each chunk's prefill rows, run by run."""
        assert layer.index is not None, "checked by the caller"
        index, work, kernels = layer.index, self.work.ratios[layer.chunk_ratio], self.kernels
        for chunk in work.chunks:
            keys = max(chunk.mean_keys * self._share_scored(work), 1.0)
            rows = chunk.tokens / chunk.num_runs
            logits = kernels.seconds("mqa_logits", rows, keys, index.num_heads)
            yield _times(logits, chunk.num_runs), _times(kernels.topk_seconds(index.topk, rows, keys), chunk.num_runs)

    def _share_scored(self, work: RatioWork) -> float:
        """Part of a prefill's keys that this rank scores: its shard's, or with PCP, or where it keeps all, all."""
        return 1.0 if self.plan.topology.pcp > 1 or self.replicates_index else work.local_share

    def attend(self, layer: Layer) -> Figure:
        """Attention of decode and prefill rows, each with the heads and keys that it has in this world."""
        return add_up(self._attend_parts(layer))

    def _attend_parts(self, layer: Layer) -> Iterator[Figure]:
        topology = self.plan.topology
        own = self.plan.model.num_heads // topology.tp
        kind = "window" if layer.window_size else "sparse"
        for decode, tokens in ((True, self.work.decode_tokens), (False, self.work.prefill_tokens)):
            if not tokens:
                continue
            merged = bool(layer.compress_ratio) and topology.dcp > 1 and (decode or topology.pcp == 1)
            heads = self.merged_heads() if merged else own
            keys = attended_keys(layer, self.work, decode=decode, local=merged)
            name = f"{kind}_{'decode' if decode else 'prefill'}"
            yield self.kernels.seconds(name, tokens, max(keys, 1.0), self.kernels.padded_heads(name, heads))
        if kind == "sparse":
            for chunk in self.work.ratios[layer.chunk_ratio].chunks:
                rows = chunk.num_keys * layer.chunk_ratio / layer.compress_ratio
                yield self._roofline(self.kernels.copy(rows * (layer.key_bytes + BF16_ROW_BYTES)))

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


def _times(figure: Figure, times: int) -> Figure:
    return Figure(times * figure.value, figure.kind, figure.source) if times != 1 else figure
