"""Which keys each query token attends: the best that the indexer finds over chunks, key spans and ranks.

    prefill    workspace keys -> logits and top-k at once; where a workspace does not hold all keys, of all ranks:
               -> candidates, joined over key spans, exchanged over DCP without PCP
    decode     the shard's keys of each request -> logits -> top-k -> candidates, exchanged over DCP

A selection is [tokens, k] int64: positions among the request's indexer keys (states, or pools of them) in no order,
then -1. Candidates are packed, 12 bytes each, from where they are found: packing and the best of all ranks are a launch
each, with one collective between. What logits the plan lets be written at once shows in memory alone, and in how many
collectives carry the candidates: one for each run of query tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from cpkit.arrays import IntArray
from cpkit.builders.indexer_metadata import IndexerChunk, IndexerDecode
from cpkit.comm.base import Comm
from cpkit.comm.key_gather import KeyGather, in_turn
from cpkit.kernels.candidates import KeyOrder, token_order, unpack_candidates
from cpkit.kernels.exchange_candidates import best_of_packed, join_packed, packed_scores
from cpkit.kernels.key_shards import WorkspaceKeys
from cpkit.kernels.table_keys import KeyTable
from cpkit.kernels.table_slots import table_slots
from cpkit.layers import Layer
from cpkit.worker.caches import LayerCaches
from cpkit.worker.places import Places
from cpkit.worker.score import IndexQueries, best_keys, decode_logits, workspace_topk


@dataclass(frozen=True, slots=True, eq=False)
class Selector:
    """Selects the keys of one layer's query tokens on one rank.

    backend: of the logits and of their top-k. gather: of the keys, where prefill rows score those of all shards.
    """

    comm: Comm
    layer: Layer
    caches: LayerCaches
    places: Places
    backend: str
    gather: KeyGather | None

    @property
    def topk(self) -> int:
        """Keys picked for a token."""
        assert self.layer.index is not None, "checked by the caller"
        return self.layer.index.topk

    def prefill(self, spans: Sequence[Sequence[IndexerChunk]], queries: IndexQueries) -> torch.Tensor:
        """The selection of the tokens of one set of chunks (chunk_sets): spans outside, runs of tokens inside."""
        gathers = spans[0][0].gather is not None
        found: torch.Tensor | None = None
        firsts = [span[0] for span in spans]
        workspaces = self.gathered_keys(firsts) if gathers else map(self.local_keys, firsts)
        if len(spans) == 1 and (gathers or self.places.plan.topology.dcp == 1):
            [keys] = workspaces
            return self.best_of_all(spans[0], queries, keys)
        for span, keys in zip(spans, workspaces, strict=True):
            order = token_order(span[0].key_span[0]) if gathers else self.shard_order(span[0].first_local)
            of_span = self.candidates(span, queries, keys, order)
            found = of_span if found is None else self.joined(found, of_span)
        assert found is not None, "a set has spans"
        if gathers:
            return unpack_candidates(found)[1]
        first = spans[0][0].token_start
        return torch.cat([self.exchange(found[run.token_start - first : run.token_stop - first]) for run in spans[0]])

    def decode(self, decode: IndexerDecode, queries: IndexQueries) -> torch.Tensor:
        """The selection of the decode tokens, which come first."""
        rows, num_tokens = self.places.rank.rows, self.places.num_decode_tokens
        bounds = rows.query_start_loc[: rows.num_decodes + 1].tolist()
        filled = [slice(start, stop) for start, stop in pairwise(bounds) if stop > start]
        logits = decode_logits(queries.part(0, num_tokens), decode, filled, self.caches, backend=self.backend)
        end = decode.seq_lens[:num_tokens, 0]
        order = self.shard_order(0)
        return self.exchange(best_keys(logits, torch.zeros_like(end), end, self.topk, order, backend=self.backend))

    def local_keys(self, chunk: IndexerChunk) -> WorkspaceKeys:
        """Keys of this rank's shard, request after request, in local order."""
        return self.caches.index_keys(self.workspace_slots(chunk))

    def gathered_keys(self, chunks: Sequence[IndexerChunk]) -> Iterator[WorkspaceKeys]:
        """Keys of all shards, of one chunk after another."""
        assert self.gather is not None and self.caches.index is not None, "prefill rows gather what an indexer scores"
        tables = ((self.caches.index, self.workspace_table(chunk)) for chunk in chunks)
        interleave = self.places.plan.shards[self.layer.chunk_ratio].interleave
        return in_turn(self.gather, tables, interleave=interleave)

    def workspace_table(self, chunk: IndexerChunk) -> KeyTable:
        """Where the chunk's keys lie in this rank's cache."""
        lens = (self.held(chunk) - chunk.first_local).clip(min=0).astype(np.int32)
        return KeyTable(
            chunk.local_key_start_loc,
            chunk.block_tables,
            torch.tensor(lens, device=chunk.block_tables.device),
            chunk.num_local_keys,
            self.caches.index_block,
            chunk.first_local,
        )

    def held(self, chunk: IndexerChunk) -> IntArray:
        """[rows] int64, keys that this rank stores of each row's request, as chunks count them."""
        req = self.places.rank.rows.req[chunk.row_start : chunk.row_stop]
        return self.places.plan.shards[self.layer.chunk_ratio].local_lens(self.places.rank.dcp_rank)[req]

    def workspace_slots(self, chunk: IndexerChunk) -> torch.Tensor:
        """[num_local_keys] int64, cache slots of the chunk's keys on this rank; -1 where a larger shard has more."""
        return table_slots(
            chunk.local_key_start_loc,
            chunk.block_tables,
            torch.tensor(self.held(chunk), device=chunk.block_tables.device),
            chunk.num_local_keys,
            block_size=self.caches.index_block,
            first_key=chunk.first_local,
        )

    def shard_order(self, first_key: int) -> KeyOrder:
        """Of keys that lie as this rank's shard does, from its key first_key on."""
        interleave = self.places.plan.shards[self.layer.chunk_ratio].interleave
        return KeyOrder(self.places.plan.topology.dcp, self.places.rank.dcp_rank, interleave, first_key)

    def best_of_all(self, runs: Sequence[IndexerChunk], queries: IndexQueries, keys: WorkspaceKeys) -> torch.Tensor:
        """The selection of runs of query tokens from a workspace that holds all keys of their requests, from 0 on."""
        assert runs[0].key_span[0] == 0, "a lone span is the first"
        return self.kept(runs, queries, keys, None).long()

    def candidates(
        self, runs: Sequence[IndexerChunk], queries: IndexQueries, keys: WorkspaceKeys, order: KeyOrder
    ) -> torch.Tensor:
        """The best keys of a workspace for runs of query tokens, packed."""
        num_tokens = runs[-1].token_stop - runs[0].token_start
        scores = torch.empty(num_tokens, self.topk, dtype=torch.float32, device=queries.q.device)
        kept = self.kept(runs, queries, keys, scores)
        return packed_scores(kept, scores, order, backend=self.backend)

    def kept(
        self, runs: Sequence[IndexerChunk], queries: IndexQueries, keys: WorkspaceKeys, scores: torch.Tensor | None
    ) -> torch.Tensor:
        """[tokens, k] int32, the best keys of a workspace, counted from each token's first; scores takes theirs."""
        part = queries.part(runs[0].token_start, runs[-1].token_stop)
        bounds = torch.cat([run.key_start for run in runs]), torch.cat([run.key_end for run in runs])
        room = self.places.plan.budget.logits_bytes
        return workspace_topk(part, keys, bounds, self.topk, scores, workspace_bytes=room, backend=self.backend)

    def joined(self, before: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """The best candidates of two key spans."""
        return join_packed(torch.cat([before, found]), 2, self.topk, backend=self.backend)

    def exchange(self, found: torch.Tensor) -> torch.Tensor:
        """The selection: the best over the DCP group, of which each rank has found the best of its shard."""
        dcp = self.places.plan.topology.dcp
        if dcp == 1:
            return unpack_candidates(found)[1]
        gathered = self.comm.all_gather(found, "dcp", what="candidates")
        return best_of_packed(gathered, dcp, self.topk, backend=self.backend)[1]


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
