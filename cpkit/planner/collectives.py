"""The collectives of a step as data: operation, group, dtype and size, in the order every rank issues them.

Per layer                                                                   group
    1 kv_latent, index_key, swa_row, slots    all-gather    pcp             pcp > 1: every rank writes what it owns
    2 index_keys, latent_rows                 all-gather    dcp             pcp > 1 and dcp > 1: per prefill chunk; of
                                                                            key spans first all index_keys, since the
                                                                            selection is complete after the last span
    3 query_heads                             all-gather    dcp, or tp      dcp > 1: rows whose outputs are merged
    4 candidates                              all-gather    dcp             dcp > 1: decode rows; with pcp = 1 all rows
    5 lse, outputs / partials                 ag_rs or a2a  dcp             their partial outputs
      output_heads                            all-gather    pcp             pcp > 1: back to the own heads
Once per step
    6 hidden_rows                             all-gather    pcp             pcp > 1: then back to batch order

The merged rows are all rows of a step under DCP alone, and its decode rows under PCP + DCP, whose prefill rows attend
gathered keys instead. Nothing here depends on one rank's values, so all ranks derive the same list.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cpkit.errors import ConfigError
from cpkit.layers import Layer
from cpkit.model import Model
from cpkit.planner.chunks import Chunk
from cpkit.planner.gather import GatherPlan
from cpkit.topology import Topology, gathered_heads

MERGES = ("ag_rs", "a2a")
DTYPE_BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8}
CANDIDATE_BYTES = 12
"""A candidate travels as an fp32 score and an int64 position, packed."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, `times` times in a row.

    op: all_gather, reduce_scatter or all_to_all; group: pcp, dcp or tp; what: the data that travels.
    elements: values of dtype that each rank of the group puts in, equal on all of them.
    """

    op: str
    group: str
    what: str
    dtype: str
    elements: int
    times: int = 1

    @property
    def bytes(self) -> int:
        """Bytes that each rank puts in, over all times."""
        return self.elements * DTYPE_BYTES[self.dtype] * self.times


@dataclass(frozen=True, slots=True)
class StepCollectives:
    """layers: the list of one layer of each kind, in model.layers' order; step: what happens once, after the layers."""

    layers: tuple[tuple[Collective, ...], ...]
    step: tuple[Collective, ...]

    def weighted(self, model: Model) -> Iterator[tuple[Collective, int]]:
        """Each collective with the number of layers that issue it, step-wide ones last."""
        for layer, collectives in zip(model.layers, self.layers, strict=True):
            for collective in collectives:
                yield collective, layer.num_layers
        for collective in self.step:
            yield collective, 1


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes, equal on all ranks, that a step's collectives follow from.

    padded: tokens every PCP rank sends; padded_kv: those whose KV travels, replicated decodes left out.
    num_tokens, num_decode_tokens: query tokens of the step, and of its decode rows.
    chunks, gathers: by keys' compress ratio, where dcp > 1; gathers only with pcp > 1.
    """

    padded: int
    padded_kv: int
    num_tokens: int
    num_decode_tokens: int
    chunks: dict[int, tuple[Chunk, ...]]
    gathers: dict[int, tuple[GatherPlan, ...]]


def list_collectives(shape: StepShape, topology: Topology, model: Model, merge: str) -> StepCollectives:
    """All collectives of a step; merge: ag_rs or a2a. Raises ConfigError for another or heads that do not divide."""
    if merge not in MERGES:
        raise ConfigError(f"merge {merge!r}: use one of {', '.join(MERGES)}")
    if _merged_rows(shape, topology):
        model.check_merge(topology)
    hidden = Collective("all_gather", "pcp", "hidden_rows", "bfloat16", shape.padded * model.hidden_size)
    return StepCollectives(
        layers=tuple(
            tuple(c for c in _layer(layer, shape, topology, model, merge) if c.elements) for layer in model.layers
        ),
        step=(hidden,) if topology.pcp > 1 and shape.padded else (),
    )


def _merged_rows(shape: StepShape, topology: Topology) -> int:
    """Query tokens whose partial outputs are merged over the DCP group."""
    if topology.dcp == 1:
        return 0
    return shape.num_decode_tokens if topology.pcp > 1 else shape.num_tokens


def _layer(layer: Layer, shape: StepShape, topology: Topology, model: Model, merge: str) -> Iterator[Collective]:
    if topology.pcp > 1:
        yield from _kv_inputs(layer, shape)
    if not layer.compress_ratio or topology.dcp == 1:
        return
    if topology.pcp > 1:
        yield from _chunk_gathers(layer, shape)
    rows = _merged_rows(shape, topology)
    yield from _query_heads(layer, rows, topology, model.num_heads)
    if layer.index and layer.runs_index:
        yield from _candidates(layer.index.topk, layer, shape, topology)
    yield from _merge(layer, rows, topology, model.num_heads, merge)


def _kv_inputs(layer: Layer, shape: StepShape) -> Iterator[Collective]:
    """What PCP ranks computed for the caches, and where compressed states go."""
    tokens = shape.padded_kv
    ratios = set()
    if layer.owns_keys and layer.compress_ratio:
        yield Collective("all_gather", "pcp", "kv_latent", "bfloat16", tokens * layer.key_dim)
        ratios.add(layer.compress_ratio)
    if layer.index and layer.owns_index_keys:
        yield Collective("all_gather", "pcp", "index_key", "bfloat16", tokens * layer.index.head_dim)
        ratios.add(layer.index.ratio)
    if layer.window_size:
        yield Collective("all_gather", "pcp", "swa_row", "bfloat16", tokens * layer.window_dim)
    for _ in sorted(ratios - {1}):
        yield Collective("all_gather", "pcp", "slots", "int64", shape.padded)


def _chunk_gathers(layer: Layer, shape: StepShape) -> Iterator[Collective]:
    """Cache rows of each prefill chunk, from all shards; spans of the same keys' queries go together."""
    ratio = layer.chunk_ratio
    spans: list[int] = []
    for chunk, gather in zip(shape.chunks[ratio], shape.gathers[ratio], strict=True):
        spans.append(gather.keys_per_rank)
        if not chunk.last_span:
            continue
        if layer.index and layer.runs_index:
            for keys in spans:
                yield Collective("all_gather", "dcp", "index_keys", "uint8", keys * layer.index.key_bytes)
        for keys in spans:
            rows = keys * ratio // layer.compress_ratio
            yield Collective("all_gather", "dcp", "latent_rows", "uint8", rows * layer.key_bytes)
        spans = []


def _query_heads(layer: Layer, rows: int, topology: Topology, num_heads: int) -> Iterator[Collective]:
    """Queries of every head that a shard is scored with; where dcp = pcp the ranks of a group hold the same heads."""
    if topology.pcp > 1 and topology.dcp == topology.pcp:
        return
    group = "dcp" if topology.pcp == 1 else "tp"
    own = num_heads // topology.tp
    yield Collective("all_gather", group, "query_heads", "bfloat16", rows * own * layer.key_dim)


def _candidates(topk: int, layer: Layer, shape: StepShape, topology: Topology) -> Iterator[Collective]:
    """Each rank's best keys of its shard: of the decode rows, and without PCP of each run of prefill queries."""

    def gather(rows: int, times: int = 1) -> Collective:
        return Collective("all_gather", "dcp", "candidates", "uint8", rows * topk * CANDIDATE_BYTES, times)

    yield gather(shape.num_decode_tokens)
    if topology.pcp > 1:
        return
    for chunk in shape.chunks[layer.chunk_ratio]:
        if chunk.last_span:
            full, rest = divmod(chunk.num_queries, chunk.run)
            if full:
                yield gather(chunk.run, full)
            yield gather(rest)


def _merge(layer: Layer, rows: int, topology: Topology, num_heads: int, merge: str) -> Iterator[Collective]:
    """Partial outputs over shards become whole outputs of each rank's own heads."""
    heads = gathered_heads(num_heads // topology.tp, tp=topology.tp, pcp=topology.pcp, dcp=topology.dcp)
    if merge == "ag_rs":
        yield Collective("all_gather", "dcp", "lse", "float32", rows * heads)
        yield Collective("reduce_scatter", "dcp", "outputs", "float32", rows * heads * layer.value_dim)
    else:
        yield Collective("all_to_all", "dcp", "partials", "float32", rows * heads * (layer.value_dim + 1))
    if topology.pcp > 1:
        yield Collective("all_gather", "pcp", "output_heads", "float32", rows * heads // topology.dcp * layer.value_dim)
