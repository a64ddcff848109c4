"""One step of one layer on one rank.

own tokens ─► gather over PCP ─► write ─┬─► PCP + DCP prefill rows: gather shards, select, attend whole keys
              (keys, slots)             └─► all other rows: select, attend the own shard, merge over DCP
                                                                                                └─► own heads
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpkit.builders.indexer_metadata import IndexerChunk, IndexerMetadata
from cpkit.builders.swa_metadata import SwaMetadata
from cpkit.comm.base import Comm
from cpkit.kernels.merge_lse import apply_sink, merge_lse
from cpkit.kernels.sparse_attention import Keys
from cpkit.worker.attend import Partial, attend, gathered_keys, stored_keys, window_keys
from cpkit.worker.clock import StageClock
from cpkit.worker.heads import gather_query_heads, merge_heads
from cpkit.worker.inputs import LayerInputs, gather_keys, write_keys
from cpkit.worker.layer_state import LayerState
from cpkit.worker.places import Places
from cpkit.worker.select import IndexQueries, Selector, all_keys, chunk_sets, quantize_queries


@dataclass(frozen=True, slots=True, eq=False)
class LayerResult:
    """What a rank has of its own query tokens and own heads after a step of a layer.

    out: [tokens, heads, values] fp32. lse: [tokens, heads] fp32 without the sink; NaN where another PCP rank merged the
    head: its output alone travels.
    selection: [tokens, k] int64, positions of the keys attended, -1 for none; None for layers of a window alone.
    """

    out: torch.Tensor
    lse: torch.Tensor
    selection: torch.Tensor | None


def run_layer_step(
    comm: Comm,
    places: Places,
    state: LayerState,
    inputs: LayerInputs,
    clock: StageClock,
    *,
    earlier: torch.Tensor | None = None,
) -> LayerResult:
    """Run a layer on this rank; every rank of the replica enters, those without tokens too.

    earlier: the selection of an earlier layer, for a layer that uses it again. Raises DesyncError where ranks disagree.
    """
    with clock.stage("gather"):
        keys = gather_keys(comm, places, inputs.keys)
    with clock.stage("metadata"):
        indexer, swa = state.build(places)
    with clock.stage("write"):
        write_keys(state.caches, places, keys, indexer)
    step = _LayerStep(comm, places, state, inputs, clock, indexer, swa, *_blank(places, state, inputs, earlier))
    if step.gathers:
        step.attend_gathered_prefills()
    step.attend_shards()
    return LayerResult(step.out, step.lse, step.selection if state.layer.compress_ratio else None)


def _blank(
    places: Places, state: LayerState, inputs: LayerInputs, earlier: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of no keys, and the selection as far as it is known: empty, an earlier layer's, or all keys."""
    layer, q = state.layer, inputs.q
    out = q.new_zeros(*q.shape[:2], layer.value_dim or layer.window_dim, dtype=torch.float32)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    if not layer.compress_ratio:
        return out, lse, torch.empty(len(q), 0, dtype=torch.int64, device=q.device)
    if layer.index is None:
        visible = (places.position + 1) // layer.compress_ratio
        return out, lse, all_keys(torch.tensor(visible, device=q.device))
    if layer.runs_index:
        return out, lse, torch.full((len(q), layer.index.topk), -1, dtype=torch.int64, device=q.device)
    assert earlier is not None, "a layer without an indexer of its own needs an earlier layer's selection"
    return out, lse, earlier


@dataclass(frozen=True, slots=True, eq=False)
class _LayerStep:
    comm: Comm
    places: Places
    state: LayerState
    inputs: LayerInputs
    clock: StageClock
    indexer: IndexerMetadata | None
    swa: SwaMetadata | None
    out: torch.Tensor
    lse: torch.Tensor
    selection: torch.Tensor

    @property
    def is_sharded(self) -> bool:
        """The layer's keys are spread over DCP ranks."""
        return self.state.layer.compress_ratio > 0 and self.places.plan.topology.dcp > 1

    @property
    def gathers(self) -> bool:
        """Prefill rows attend keys gathered from all shards, and are whole without a merge."""
        return self.is_sharded and self.places.plan.topology.pcp > 1

    @property
    def selector(self) -> Selector:
        return Selector(self.comm, self.state.layer, self.state.caches, self.places)

    def queries(self) -> IndexQueries | None:
        """Index queries of all own tokens; None for layers that run no indexer."""
        if self.inputs.index_q is None or self.inputs.index_weights is None:
            return None
        return quantize_queries(self.inputs.index_q, self.inputs.index_weights)

    def attend_gathered_prefills(self) -> None:
        """PCP + DCP: each set of chunks is selected from, span by span, and then attended, span by span."""
        tokens = slice(self.places.num_decode_tokens, self.places.num_tokens)
        if self.swa is not None:
            with self.clock.stage("attend"):
                self.add(tokens, [window_keys(self.swa, tokens, self.state.caches)])
        queries = self.queries()
        chunks = self.indexer.prefill.chunks if self.indexer and self.indexer.prefill else ()
        for spans in chunk_sets(chunks):
            if queries is not None:
                with self.clock.stage("index"):
                    self.selector.prefill(spans, queries, self.selection)
            with self.clock.stage("attend"):
                self.attend_spans(spans)
        self.sink(tokens)

    def attend_spans(self, spans: Sequence[Sequence[IndexerChunk]]) -> None:
        """Gather the rows of each key span once, and add what its keys give to the outputs of the chunk's tokens."""
        tokens = slice(spans[0][0].token_start, spans[0][-1].token_stop)
        caches = self.state.caches
        for span in spans:
            rows = caches.latent_rows(self.selector.workspace_slots(span[0]))
            gathered = self.comm.all_gather(rows, "dcp", what="latent_rows")
            self.add(tokens, [gathered_keys(self.selection[tokens], span[0], self.places, gathered, caches)])

    def attend_shards(self) -> None:
        """Rows that attend this rank's own keys: without gathered prefills all rows, else the decode rows."""
        tokens = slice(0, self.places.num_decode_tokens if self.gathers else self.places.num_tokens)
        num_merged = tokens.stop if self.is_sharded else 0
        q = self.inputs.q[tokens]
        if num_merged:
            with self.clock.stage("merge"):
                q = gather_query_heads(self.comm, q)
        with self.clock.stage("index"):
            self.select_from_shards()
        with self.clock.stage("attend"):
            partial = attend(q, self.shard_groups(tokens), self.state.caches)
        if num_merged:
            with self.clock.stage("merge"):
                partial = merge_heads(self.comm, partial, self.inputs.sink, self.places.plan.merge)
        self.out[tokens], self.lse[tokens] = partial
        if not num_merged:
            self.sink(tokens)

    def select_from_shards(self) -> None:
        """Decode rows; without gathered prefills the prefill rows too."""
        queries = self.queries()
        if queries is None:
            return
        assert self.indexer is not None, "an indexer scores a sharded cache"
        if self.places.num_decode_tokens:
            assert self.indexer.decode is not None, "planner and builder agree on what is a decode"
            self.selector.decode(self.indexer.decode, queries, self.selection)
        if self.indexer.prefill is not None and not self.gathers:
            for spans in chunk_sets(self.indexer.prefill.chunks):
                self.selector.prefill(spans, queries, self.selection)

    def shard_groups(self, tokens: slice) -> list[Keys]:
        """Keys of this rank's shard, and the window, which of the ranks whose partials are merged only one adds."""
        caches = self.state.caches
        groups: list[Keys] = []
        if self.state.layer.compress_ratio:
            groups.append(stored_keys(self.selection[tokens], self.places, caches))
        if self.swa is not None and not (self.is_sharded and self.places.rank.dcp_rank):
            groups.append(window_keys(self.swa, tokens, caches))
        return groups

    def add(self, tokens: slice, groups: list[Keys]) -> None:
        """Merge what further keys give into the outputs of some tokens."""
        found = attend(self.inputs.q[tokens], groups, self.state.caches)
        if not bool(self.lse[tokens].isneginf().all()):  # the first keys of some tokens need no merge
            found = _merged((self.out[tokens], self.lse[tokens]), found)
        self.out[tokens], self.lse[tokens] = found

    def sink(self, tokens: slice) -> None:
        """Let the attention sink take its share, once, of finished outputs."""
        if self.inputs.sink is not None:
            self.out[tokens] = apply_sink(self.out[tokens], self.lse[tokens], self.inputs.sink)


def _merged(*parts: Partial) -> Partial:
    outs, lses = zip(*parts, strict=True)
    return merge_lse(torch.stack(outs), torch.stack(lses))
