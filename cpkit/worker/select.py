"""Which keys each query token attends: the indexer's scores, and the best of them over chunks, key spans and ranks.

    prefill    workspace keys -> logits -> top-k -> candidates, carried over key spans, exchanged over DCP without PCP
    decode     the shard's keys of each request -> logits -> top-k -> candidates, exchanged over DCP

A selection is [tokens, k] int64: positions among the request's keys (states), best first, then -1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from cpkit.builders.indexer_metadata import IndexerChunk, IndexerDecode
from cpkit.comm.base import Comm
from cpkit.kernels.candidates import best_candidates, global_topk, local_candidates, pack_candidates
from cpkit.kernels.fp8 import quantize_fp8
from cpkit.kernels.index_cache import pack_index_keys, unpack_index_keys
from cpkit.kernels.mqa_logits import mqa_logits
from cpkit.kernels.table_slots import table_slots
from cpkit.kernels.topk import topk
from cpkit.layers import Layer
from cpkit.worker.caches import LayerCaches
from cpkit.worker.places import Places

Candidates = tuple[torch.Tensor, torch.Tensor]
"""Scores [tokens, k] fp32 and positions [tokens, k] int64."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexQueries:
    """q: [tokens, heads, dim] fp8 e4m3; weights: [tokens, heads] fp32, with q's scales folded in."""

    q: torch.Tensor
    weights: torch.Tensor

    def part(self, start: int, stop: int) -> "IndexQueries":
        """Tokens start .. stop."""
        return IndexQueries(self.q[start:stop], self.weights[start:stop])


def quantize_queries(q: torch.Tensor, weights: torch.Tensor) -> IndexQueries:
    """q: [tokens, heads, dim], weights: [tokens, heads] fp32 with the softmax and head scales folded in."""
    num_tokens, heads, dim = q.shape
    values, scales = quantize_fp8(q.reshape(-1, dim), group_size=dim)
    return IndexQueries(values.view(num_tokens, heads, dim), weights * scales.view(num_tokens, heads))


@dataclass(frozen=True, slots=True)
class Placing:
    """How the keys of a workspace became local: by default not at all, so that places count on from first_key."""

    dcp_size: int = 1
    dcp_rank: int = 0
    interleave: int = 1
    first_key: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Selector:
    """Selects the keys of one layer's query tokens on one rank."""

    comm: Comm
    layer: Layer
    caches: LayerCaches
    places: Places

    @property
    def topk(self) -> int:
        """Keys picked for a token."""
        assert self.layer.index is not None, "checked by the caller"
        return self.layer.index.topk

    @property
    def turn(self) -> int:
        """Keys that a DCP rank keeps before the next rank's turn."""
        return self.places.plan.shards[self.layer.compress_ratio].interleave

    def prefill(self, spans: Sequence[Sequence[IndexerChunk]], queries: IndexQueries, selection: torch.Tensor) -> None:
        """Write the selection of the tokens of one set of chunks (chunk_sets): spans outside, runs of tokens inside."""
        gathers = spans[0][0].gather is not None
        carried: dict[int, Candidates] = {}
        for span in spans:
            values, scales = self.gathered_keys(span[0]) if gathers else self.local_keys(span[0])
            for run in span:
                found = self.candidates(run, queries, values, scales, gathers=gathers)
                if run.token_start in carried and run.token_stop > run.token_start:
                    before = carried[run.token_start]
                    scores, positions = (torch.cat(pair, dim=1) for pair in zip(before, found, strict=True))
                    found = best_candidates(scores, positions, self.topk)
                carried[run.token_start] = found
                if run.last_span:
                    best = found if gathers else self.exchange(found)
                    selection[run.token_start : run.token_stop] = best[1]

    def local_keys(self, chunk: IndexerChunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of this rank's shard, request after request, in local order."""
        return self.caches.index_keys(self.workspace_slots(chunk))

    def gathered_keys(self, chunk: IndexerChunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of all shards in token order."""
        rows = pack_index_keys(*self.local_keys(chunk))
        gathered = self.comm.all_gather(rows, "dcp", what="index_keys")
        return unpack_index_keys(gathered[chunk.deinterleave_idx()])

    def workspace_slots(self, chunk: IndexerChunk) -> torch.Tensor:
        """[num_local_keys] int64, cache slots of the chunk's keys on this rank; -1 where a larger shard has more."""
        req = self.places.rank.rows.req[chunk.row_start : chunk.row_stop]
        held = self.places.plan.shards[self.layer.compress_ratio].local_lens(self.places.rank.dcp_rank)[req]
        return table_slots(
            chunk.local_key_start_loc,
            chunk.block_tables,
            torch.tensor(held, device=chunk.block_tables.device),
            chunk.num_local_keys,
            block_size=self.caches.states_per_block,
            first_key=chunk.first_local,
        )

    def candidates(
        self, run: IndexerChunk, queries: IndexQueries, values: torch.Tensor, scales: torch.Tensor, *, gathers: bool
    ) -> Candidates:
        """The best keys of a workspace for one run of query tokens, at their global positions."""
        part = queries.part(run.token_start, run.token_stop)
        placing = Placing(first_key=run.key_span[0]) if gathers else self.placing(run.first_local)
        return self.score(part, values, scales, (run.key_start, run.key_end), placing)

    def placing(self, first_key: int) -> "Placing":
        """Of keys that lie as this rank's shard does, from its key first_key on."""
        return Placing(self.places.plan.topology.dcp, self.places.rank.dcp_rank, self.turn, first_key)

    def score(
        self,
        queries: IndexQueries,
        values: torch.Tensor,
        scales: torch.Tensor,
        ranges: tuple[torch.Tensor, torch.Tensor],
        placing: "Placing",
    ) -> Candidates:
        """Logits of some tokens against some keys, and the best of them."""
        key_start, key_end = ranges
        logits = mqa_logits(queries.q, values, scales, queries.weights, key_start, key_end, backend="torch")
        return local_candidates(
            topk(logits, key_start, key_end, self.topk, backend="torch"),
            logits,
            key_start,
            dcp_size=placing.dcp_size,
            dcp_rank=placing.dcp_rank,
            interleave=placing.interleave,
            first_key=placing.first_key,
        )

    def exchange(self, found: Candidates) -> Candidates:
        """The best over the DCP group, of which each rank has found the best of its shard."""
        dcp = self.places.plan.topology.dcp
        if dcp == 1:
            return found
        gathered = self.comm.all_gather(pack_candidates(*found), "dcp", what="candidates")
        return global_topk(gathered, dcp, self.topk)

    def decode(self, decode: IndexerDecode, queries: IndexQueries, selection: torch.Tensor) -> None:
        """Write the selection of the decode tokens, which come first."""
        num_tokens = self.places.num_decode_tokens
        placing = self.placing(0)
        parts: list[Candidates] = []
        for start, stop in self.decode_rows():
            end = decode.seq_lens[start:stop, 0]
            num_keys = int(end.max())
            slots = table_slots(
                torch.tensor([0, num_keys], device=end.device),
                decode.block_tables[start : start + 1],
                torch.tensor([num_keys], device=end.device),
                num_keys,
                block_size=self.caches.states_per_block,
            )
            values, scales = self.caches.index_keys(slots)
            ranges = torch.zeros_like(end), end
            parts.append(self.score(queries.part(start, stop), values, scales, ranges, placing))
        found = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        selection[:num_tokens] = self.exchange((found[0], found[1]))[1]

    def decode_rows(self) -> Iterator[tuple[int, int]]:
        """Tokens [start, stop) of each decode row that has any."""
        rows = self.places.rank.rows
        bounds = rows.query_start_loc[: rows.num_decodes + 1].tolist()
        return ((start, stop) for start, stop in pairwise(bounds) if stop > start)


def chunk_sets(chunks: Sequence[IndexerChunk]) -> Iterator[list[list[IndexerChunk]]]:
    """Chunks of the same query tokens together: each set lists its key spans, each span its runs of tokens."""
    spans: list[list[IndexerChunk]] = []
    for chunk in chunks:
        if chunk.fills_workspace:
            if spans and spans[-1][0].last_span:
                yield spans
                spans = []
            spans.append([])
        spans[-1].append(chunk)
    if spans:
        yield spans


def all_keys(visible: torch.Tensor) -> torch.Tensor:
    """The selection of a layer that attends every visible key.  visible 2 0 1 -> 0 1, - -, 0 -"""
    key = torch.arange(int(visible.max()) if visible.numel() else 0, device=visible.device)
    return torch.where(key < visible[:, None], key, -1)
