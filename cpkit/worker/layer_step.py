"""One step of one layer on one rank.

own tokens ─► gather over PCP ─► write ─┬─► PCP + DCP prefill rows: gather shards, select, attend whole keys ─┐
              (keys, slots)             └─► all other rows: select, attend the own shard, merge over DCP ─────┴─► result

Only `write` changes what outlives the step: the caches. All stages after it return what they make.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpkit.builders.indexer_metadata import IndexerChunk
from cpkit.comm.base import Comm
from cpkit.kernels.merge_lse import apply_sink
from cpkit.kernels.pool_keys import pool_keys
from cpkit.kernels.sparse_attention import Keys
from cpkit.worker.attend import (
    all_gathered_keys,
    all_stored_keys,
    attend,
    gathered_keys,
    stored_keys,
    window_keys,
)
from cpkit.worker.clock import StageClock
from cpkit.worker.heads import gather_query_heads, merge_heads
from cpkit.worker.inputs import LayerInputs, gather_layer_keys, write_keys
from cpkit.worker.layer_state import LayerState, StepMetadata
from cpkit.worker.outputs import Outputs
from cpkit.worker.places import Places
from cpkit.worker.score import IndexQueries, quantize_queries
from cpkit.worker.select import Selector, chunk_sets


@dataclass(frozen=True, slots=True, eq=False)
class LayerResult:
    """What a rank has of its own query tokens and own heads after a step of a layer.

    out: [tokens, heads, values] fp32. lse: [tokens, heads] fp32 without the sink; NaN where another PCP rank merged the
    head: its output alone travels.
    selection: [tokens, k] int64, positions of the indexer keys picked (kernels/pool_keys.py: of pools of those
    attended), -1 for none; None for layers without an index, which attend their window alone, or all complete keys too.
    num_merged: leading tokens whose outputs were merged over DCP (heads.py: own_merged_heads).
    """

    out: torch.Tensor
    lse: torch.Tensor
    selection: torch.Tensor | None
    num_merged: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerStep:
    """What the stages of a layer read.

    metadata: of this step, in the builders' buffers. earlier: the selection of an earlier layer, for a layer that uses
    it again.
    """

    comm: Comm
    places: Places
    state: LayerState
    inputs: LayerInputs
    metadata: StepMetadata
    clock: StageClock
    earlier: torch.Tensor | None

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
        """Selects from this layer's keys."""
        state = self.state
        return Selector(self.comm, state.layer, state.caches, self.places, state.backend, state.gather)

    def queries(self) -> IndexQueries:
        """Index queries of all own tokens."""
        assert self.inputs.index_q is not None and self.inputs.index_weights is not None, "the layer runs its indexer"
        return quantize_queries(self.inputs.index_q, self.inputs.index_weights, backend=self.state.backend)

    def known_selection(self, tokens: slice) -> torch.Tensor | None:
        """Of some tokens: an earlier layer's, none picked yet, or None for layers without an index."""
        index = self.state.layer.index
        if index is None:
            return None
        if self.state.layer.runs_index:
            num_tokens = len(self.inputs.q[tokens])
            return torch.full((num_tokens, index.topk), -1, dtype=torch.int64, device=self.inputs.q.device)
        assert self.earlier is not None, "a layer without an indexer of its own needs an earlier layer's selection"
        return self.earlier[tokens]


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
        keys = gather_layer_keys(comm, places, inputs.keys)
    with clock.stage("metadata"):
        metadata = state.build(places)
    with clock.stage("write"):
        write_keys(state.caches, places, keys, metadata)
    step = LayerStep(comm, places, state, inputs, metadata, clock, earlier)
    if not step.gathers:
        return attend_shards(step, places.num_tokens)
    prefills = attend_gathered_prefills(step)
    return _joined(attend_shards(step, places.num_decode_tokens), prefills)


def attend_shards(step: LayerStep, num_tokens: int) -> LayerResult:
    """The leading tokens over this rank's own keys, then merged over DCP: all tokens, or those of decode rows."""
    tokens, q, clock = slice(0, num_tokens), step.inputs.q[:num_tokens], step.clock
    merges = step.is_sharded and num_tokens > 0
    if merges:
        with clock.stage("merge"):
            q = gather_query_heads(step.comm, q)
    with clock.stage("index"):
        selection = _select_from_shards(step, tokens)
    with clock.stage("attend"):
        out, lse = attend(q, _shard_groups(step, tokens, selection), step.state.caches)
    if merges:
        with clock.stage("merge"):
            out, lse = merge_heads(step.comm, (out, lse), step.inputs.sink, step.places.plan.merge)
    elif step.inputs.sink is not None:
        out = apply_sink(out, lse, step.inputs.sink)
    return LayerResult(out, lse, selection, num_tokens if merges else 0)


def attend_gathered_prefills(step: LayerStep) -> LayerResult:
    """PCP + DCP, prefill rows: each set of chunks is selected from, span by span, and then attended, span by span."""
    places, caches, clock = step.places, step.state.caches, step.clock
    first = places.num_decode_tokens
    prefills = slice(first, places.num_tokens)
    q, selection = step.inputs.q[prefills], step.known_selection(prefills)
    outputs = Outputs(len(q), q.shape[1], caches.value_dim, q.device)
    if step.metadata.swa is not None:
        with clock.stage("attend"):
            outputs.add(slice(None), attend(q, [window_keys(step.metadata.swa, prefills, caches)], caches))
    queries = step.queries() if step.state.layer.runs_index else None
    prefill = step.metadata.indexer.prefill if step.metadata.indexer else None
    for spans in chunk_sets(prefill.chunks if prefill else ()):
        tokens = slice(spans[0][0].token_start - first, spans[0][-1].token_stop - first)
        if queries is not None and selection is not None:
            with clock.stage("index"):
                selection[tokens] = step.selector.prefill(spans, queries)
        with clock.stage("attend"):
            for span in spans:
                keys = _gathered_group(step, span, None if selection is None else selection[tokens])
                outputs.add(tokens, attend(q[tokens], [keys], caches))
    out = outputs.out if step.inputs.sink is None else apply_sink(outputs.out, outputs.lse, step.inputs.sink)
    return LayerResult(out, outputs.lse, selection, 0)


def _gathered_group(step: LayerStep, span: Sequence[IndexerChunk], selection: torch.Tensor | None) -> Keys:
    """The keys of a span, gathered once for all its tokens: those selected, or all that are complete."""
    caches = step.state.caches
    stored = caches.latent_rows(step.selector.workspace_slots(span[0]))
    rows = step.comm.all_gather(stored, "dcp", what="latent_rows")
    if selection is None:
        return all_gathered_keys(span, rows, caches)
    return gathered_keys(selection, span[0], step.places, rows, caches)


def _select_from_shards(step: LayerStep, tokens: slice) -> torch.Tensor | None:
    """Decode rows; without gathered prefills the prefill rows too."""
    selection, indexer = step.known_selection(tokens), step.metadata.indexer
    if selection is None or not step.state.layer.runs_index:
        return selection
    assert indexer is not None, "an indexer scores a sharded cache"
    queries, num_decode_tokens = step.queries(), step.places.num_decode_tokens
    if num_decode_tokens:
        assert indexer.decode is not None, "planner and builder agree on what is a decode"
        selection[:num_decode_tokens] = step.selector.decode(indexer.decode, queries)
    if indexer.prefill is not None and not step.gathers:
        for spans in chunk_sets(indexer.prefill.chunks):
            selection[spans[0][0].token_start : spans[0][-1].token_stop] = step.selector.prefill(spans, queries)
    return selection


def _shard_groups(step: LayerStep, tokens: slice, selection: torch.Tensor | None) -> list[Keys]:
    """Keys of this rank's shard, and the window, which of the ranks whose partials are merged only one adds."""
    places, caches = step.places, step.state.caches
    groups: list[Keys] = []
    if selection is not None:
        groups.append(stored_keys(_picked_keys(step, tokens, selection), places, caches))
    elif step.state.layer.compress_ratio:
        groups.append(all_stored_keys(tokens, places, caches))
    if step.metadata.swa is not None and not (step.is_sharded and places.rank.dcp_rank):
        groups.append(window_keys(step.metadata.swa, tokens, caches))
    return groups


def _picked_keys(step: LayerStep, tokens: slice, selection: torch.Tensor) -> torch.Tensor:
    """[tokens, k] int64, positions of the keys that a selection stands for, -1 for none."""
    layer = step.state.layer
    if layer.pool == 1:
        return selection
    num_keys = (step.places.position[tokens] + 1) // layer.compress_ratio
    return pool_keys(selection, torch.tensor(num_keys, device=selection.device), pool=layer.pool)


def _joined(decodes: LayerResult, prefills: LayerResult) -> LayerResult:
    """Decode tokens come first."""
    selection = None
    if decodes.selection is not None and prefills.selection is not None:
        selection = torch.cat([decodes.selection, prefills.selection])
    return LayerResult(
        out=torch.cat([decodes.out, prefills.out]),
        lse=torch.cat([decodes.lse, prefills.lse]),
        selection=selection,
        num_merged=decodes.num_merged,
    )
