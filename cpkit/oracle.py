"""The truth about query tokens: each request whole, unsharded, in float64, from the same activations.

    selection   the topk best of all visible indexer keys, by score, then lower position; of pools of keys (kpool) all
                keys of the chosen ones, and those that fill no pool
    lse, out    softmax over the selected keys (or all) and the window; the sink takes its share of out alone

Keys are taken as their cache format stores them, so that what is left between a rank and the truth is the arithmetic of
fp32. Nothing of a plan is used: no partition, shard, chunk, slot or collective.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cpkit.kernels.fp8 import dequantize_fp8, quantize_fp8
from cpkit.layers import Layer
from cpkit.model import Model
from cpkit.worker.caches import row_format
from cpkit.worker.token_activations import TokenActivations


@dataclass(frozen=True, slots=True)
class Token:
    """A query token: its request and its position there."""

    req_id: int
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Index scores of a token's visible keys, [num_keys] float64 each: the scores, and how far fp32 sums may be off."""

    values: torch.Tensor
    errors: torch.Tensor

    def best(self, topk: int) -> torch.Tensor:
        """[<= topk] int64, positions, best first; equal scores: the lower position. NaN is never chosen."""
        order = torch.sort(self.values + 0.0, descending=True, stable=True).indices  # -0.0 + 0.0 is +0.0
        return order[~self.values[order].isnan()][:topk]

    def allows(self, missing: set[int], extra: set[int], wanted: torch.Tensor) -> bool:
        """Whether a selection may have the extra keys in place of the missing ones, of those wanted.

        Only where rounding decides: such a key's score and the worst wanted one's differ by no more than their errors.
        """
        keys, worst = torch.tensor(sorted(missing | extra), dtype=torch.int64), wanted[-1:]
        errors = self.errors[keys] + self.errors[worst]
        return bool(((self.values[keys] - self.values[worst]).abs() <= errors).logical_and(errors > 0).all())


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """out: [heads, values] float64; lse: [heads] float64, -inf without keys; largest: of the values summed."""

    out: torch.Tensor
    lse: torch.Tensor
    largest: float


@dataclass(eq=False)
class Oracle:
    """Answers about tokens of any layer; keys that were made once are kept. May be asked by several threads."""

    source: TokenActivations
    _kept: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def about(self, model: Model, number: int, tokens: Sequence[Token], heads: range) -> "Truth":
        """The truth about some tokens and heads in a layer; number: of the layer in the model's list."""
        layer = model.layers[number]
        # a layer that shares a selection attends what the last indexer before it chose
        indexer = max((i for i in range(number + 1) if model.layers[i].runs_index), default=number)
        req_ids = torch.tensor([token.req_id for token in tokens], dtype=torch.int64)
        positions = torch.tensor([token.position for token in tokens], dtype=torch.int64)
        for req_id in {token.req_id for token in tokens}:
            self._make_ahead(layer, number, indexer, req_id, max(t.position for t in tokens if t.req_id == req_id) + 1)
        names = self.names(req_ids, positions)
        make, form, index = self.source.activations, row_format(layer), layer.index
        index_query = index_weights = None
        if index is not None:
            q = make.heads("index_query", indexer, names, positions, index.head_dim, range(index.num_heads))
            values, scales = quantize_fp8(q.flatten(0, 1), group_size=index.head_dim)
            index_query = dequantize_fp8(values, scales).double().view(q.shape)
            index_weights = make.rows("index_weights", indexer, names, positions, index.num_heads).double()
        return Truth(
            oracle=self,
            layer=layer,
            number=number,
            indexer=indexer,
            tokens=tuple(tokens),
            query=make.heads("query", number, names, positions, form.dim, heads).double(),
            index_query=index_query,
            index_weights=index_weights,
            sink=self.source.sink(number, heads, torch.device("cpu")).double() if layer.window_size else None,
        )

    def hidden(self, req_ids: torch.Tensor, positions: torch.Tensor, hidden_size: int) -> torch.Tensor:
        """[n, hidden_size] bf16, hidden rows of any tokens; req_ids, positions: [n] int64."""
        names = self.names(req_ids, positions)
        return self.source.activations.rows("hidden", 0, names, positions, hidden_size)

    def names(self, req_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n] int64, what the tokens' activations are keyed by."""
        return torch.from_numpy(self.source.content.names(req_ids.numpy(), positions.numpy()))

    def keys(self, stream: str, layer: Layer, number: int, req_id: int, num_keys: int) -> torch.Tensor:
        """[num_keys, dim] fp32, the first keys of a request as their cache stores them."""
        place = stream, number, req_id
        with self._lock:
            kept = self._kept.get(place)
            if kept is None or len(kept) < num_keys:
                key = torch.arange(0 if kept is None else len(kept), num_keys)
                new = self._make(stream, layer, number, req_id, key)
                kept = self._kept[place] = new if kept is None else torch.cat([kept, new])
        return kept[:num_keys]

    def _make_ahead(self, layer: Layer, number: int, indexer: int, req_id: int, num_tokens: int) -> None:
        """Make all that the tokens of a request will ask for at once, rather than key by key."""
        if layer.compress_ratio:
            self.keys("latent", layer, number, req_id, num_tokens // layer.compress_ratio)
        if layer.index:
            self.keys("index_key", layer, indexer, req_id, num_tokens // layer.index.ratio)
        if layer.window_size:
            self.keys("window", layer, number, req_id, num_tokens)

    def _make(self, stream: str, layer: Layer, number: int, req_id: int, key: torch.Tensor) -> torch.Tensor:
        ratio = {"window": 1, "latent": layer.compress_ratio, "index_key": layer.chunk_ratio}[stream]
        names = self.names(torch.full_like(key, req_id), (key + 1) * ratio - 1)
        if stream == "index_key":
            assert layer.index is not None, "asked for layers with an indexer"
            values = self.source.activations.rows(stream, number, names, key, layer.index.head_dim)
            return dequantize_fp8(*quantize_fp8(values, group_size=layer.index.head_dim))
        form = row_format(layer)
        return form.unpack(form.pack(self.source.activations.rows(stream, number, names, key, form.dim)))


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Answers about tokens of one layer.

    indexer: number of the layer whose selection this one attends. query: [tokens, heads, dim], index_query: [tokens,
    index heads, head_dim], index_weights: [tokens, index heads], sink: [heads], float64.
    """

    oracle: Oracle
    layer: Layer
    number: int
    indexer: int
    tokens: tuple[Token, ...]
    query: torch.Tensor
    index_query: torch.Tensor | None
    index_weights: torch.Tensor | None
    sink: torch.Tensor | None

    def num_keys(self, at: int) -> int:
        """Keys of the sharded cache that are complete at a token's position; at: among the tokens."""
        return (self.tokens[at].position + 1) // self.layer.compress_ratio if self.layer.compress_ratio else 0

    def num_index_keys(self, at: int) -> int:
        """Of them, or of pools of them, those that the indexer scores."""
        return (self.tokens[at].position + 1) // self.layer.index.ratio if self.layer.index else self.num_keys(at)

    def picked_keys(self, at: int, picked: torch.Tensor) -> torch.Tensor:
        """[n] int64, keys that a token attends when these indexer keys are picked."""
        pool = self.layer.pool
        if pool == 1:
            return picked
        tail = range(self.num_index_keys(at) * pool, self.num_keys(at))
        members = [one * pool + within for one in picked.tolist() for within in range(pool)]
        return torch.tensor([*members, *tail], dtype=torch.int64)

    def scores(self, at: int) -> Scores:
        """Scores of all indexer keys that a token sees."""
        assert self.index_query is not None and self.index_weights is not None, "asked for layers with an indexer"
        query, weights, req_id = self.index_query[at], self.index_weights[at], self.tokens[at].req_id
        keys = self.oracle.keys("index_key", self.layer, self.indexer, req_id, self.num_index_keys(at)).double()
        scores = (keys @ query.T).clamp(min=0) @ weights
        if self.oracle.source.activations.data == "exact":
            return Scores(scores, torch.zeros_like(scores))
        terms = (keys.abs() @ query.abs().T) @ weights.abs()
        return Scores(scores, terms * (query.numel() ** 0.5 + 8) * 2.0**-23)

    def attend(self, at: int, selection: torch.Tensor) -> Attended:
        """A token's output and LSE over the selected keys ([n] int64) and its window."""
        token, layer = self.tokens[at], self.layer
        parts = []
        if layer.compress_ratio:
            parts.append(self.oracle.keys("latent", layer, self.number, token.req_id, self.num_keys(at))[selection])
        if layer.window_size:
            first = max(0, token.position - layer.window_size + 1)
            parts.append(self.oracle.keys("window", layer, self.number, token.req_id, token.position + 1)[first:])
        keys = torch.cat(parts).double()
        values = keys[:, : layer.value_dim or keys.shape[1]]
        scores = self.query[at] @ keys.T * keys.shape[1] ** -0.5
        lse = torch.logsumexp(scores, 1)
        shares = torch.exp(scores - lse.nan_to_num(neginf=0.0)[:, None])
        if self.sink is not None:
            shares = shares / (1 + torch.exp(self.sink - lse))[:, None]
        return Attended(shares @ values, lse, float(values.abs().max()) if len(values) else 0.0)
