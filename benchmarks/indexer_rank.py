"""The indexer's step of one layer on one rank, stage after stage: what indexer_step.py times and checks.

    one GPU, PCP     queries ─ insert ─ keys ─────────────────── logits, top-k
    PCP + DCP        queries ─ insert ─ keys of all shards ───── logits, top-k
    DCP alone        queries ─ insert ─ keys of the own shard ── logits, top-k ─ exchange

queries: fp8 of the index queries. insert: new keys from all PCP ranks, quantized into the pages. keys: pages to a
workspace. Rows, ranges, chunks and slots are those that the planner and the builders give the rank program.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cpkit.batch import Batch
from cpkit.builders.indexer_metadata import IndexerChunk
from cpkit.comm.base import Comm
from cpkit.comm.key_gather import KeyGather
from cpkit.kernels.exchange_candidates import packed_candidates
from cpkit.kernels.indexer_topk import indexer_topk
from cpkit.kernels.key_shards import IndexKeys, KeyShards, WorkspaceKeys
from cpkit.kernels.mqa_logits import mqa_logits
from cpkit.kernels.table_keys import KeyTable, table_keys
from cpkit.kernels.topk import topk
from cpkit.layers import Layer
from cpkit.planner.slots import sharded_slots
from cpkit.settings import StepSettings
from cpkit.worker.inputs import LayerKeys, gather_layer_keys
from cpkit.worker.layer_state import Pool, make_state
from cpkit.worker.places import Places
from cpkit.worker.score import IndexQueries, quantize_queries
from cpkit.worker.select import Selector, chunk_sets

BLOCK = 64
Mark = Callable[[str], None]
"""Told the name of a stage when all its work is on the stream."""


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """keys: [context, 128] bf16 of all tokens; q: [new, heads, 128] bf16, weights: [new, heads] fp32, of the last."""

    q: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor

    @property
    def context(self) -> int:
        """Tokens of the request, new ones included."""
        return len(self.keys)

    @property
    def num_new(self) -> int:
        """Query tokens of the step."""
        return len(self.q)


def make_activations(context: int, num_new: int, heads: int, device: torch.device) -> Activations:
    """Random, and the same on every rank that asks."""
    generator = torch.Generator(device).manual_seed(context)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    return Activations(draw(num_new, heads, 128).bfloat16(), draw(num_new, heads), draw(context, 128).bfloat16())


class RankStep:
    """One rank of a prefill step of one request; its earlier keys are in the cache when it is made.

    settings: a world, and a budget whose workspace holds all keys. gather: under PCP + DCP.
    """

    def __init__(
        self,
        comm: Comm,
        settings: StepSettings,
        layer: Layer,
        data: Activations,
        backend: str,
        gather: KeyGather | None = None,
    ) -> None:
        topology, device = settings.topology, comm.device
        num_blocks = -(-data.context // topology.virtual_block)
        table = np.random.default_rng(data.context).permutation(num_blocks)[None] + 1
        batch = Batch.from_lens([data.context], [data.num_new], [data.context], block_tables=table)
        plan = settings.plan(batch, comm.rank)
        places = Places(plan, plan.rank(comm.rank), device)
        state = make_state(layer, settings, Pool(num_blocks + 1, num_blocks), comm, backend, gather)
        indexer = state.build(places).indexer
        assert indexer is not None and indexer.prefill is not None and state.caches.index is not None
        self.comm, self.places, self.caches, self.backend, self.gather = comm, places, state.caches, backend, gather
        self.cache, self.slots = state.caches.index, indexer.slot_mapping
        self.selector = Selector(comm, layer, state.caches, places, backend, gather)
        self.interleave = plan.shards[layer.compress_ratio].interleave
        self.sets: list[tuple[list[IndexerChunk], KeyTable]] = []
        for spans in chunk_sets(indexer.prefill.chunks):
            assert len(spans) == 1, "a workspace for all keys has one span"
            self.sets.append((spans[0], self.selector.workspace_table(spans[0][0])))
        own = torch.from_numpy(places.position - (data.context - data.num_new)).to(device)
        self.own_tokens = own
        self.q, self.weights = data.q[own], data.weights[own]
        self.new_keys = data.keys[data.context - data.num_new :][own]
        self._write_earlier(data.keys[: data.context - data.num_new])

    def run(self, way: str, mark: Mark) -> list[torch.Tensor]:
        """The selection of the own tokens, [tokens, k] positions in parts. way: one of `ways`."""
        queries = quantize_queries(self.q, self.weights, backend=self.backend)
        mark("queries")
        self.insert()
        mark("insert")
        select = {"written": self.select_written, "listed": self.select_listed, "candidates": self.select_candidates}
        found: list[torch.Tensor] = []
        for runs, table in self.sets:
            keys = self.workspace(table)
            mark("keys")
            found += select[way](runs, queries, keys, mark)
        if way != "candidates":
            return found
        chosen = [self.selector.exchange(part) for part in found]
        mark("exchange")
        return chosen

    @property
    def ways(self) -> tuple[str, ...]:
        """How this rank may select: top-k of written logits or without them; candidates, where shards are scored."""
        topology = self.places.plan.topology
        return ("candidates",) if topology.dcp > 1 and topology.pcp == 1 else ("written", "listed")

    def insert(self) -> None:
        """Write the step's keys, of all PCP ranks."""
        keys = gather_layer_keys(
            self.comm, self.places, LayerKeys(latent=None, index_key=self.new_keys, window=None)
        ).index_key
        assert keys is not None
        self.caches.insert_index(keys, self.slots)

    def workspace(self, table: KeyTable) -> WorkspaceKeys:
        """Keys of all shards, as the gather gives them, or this rank's side by side."""
        if self.gather is not None:
            return self.gather.start(self.cache, table, interleave=self.interleave).wait()
        return table_keys(self.cache, table, 128, backend=self.backend)

    def select_written(
        self, runs: list[IndexerChunk], queries: IndexQueries, keys: WorkspaceKeys, mark: Mark
    ) -> list[torch.Tensor]:
        """Logits of as many tokens as the budget lets be written at once, then their top-k."""
        found = []
        for run, logits in self.logits(runs, queries, keys, mark):
            found.append(topk(logits, run.key_start, run.key_end, self.selector.topk, backend=self.backend))
            mark("top-k")
        return found

    def select_candidates(
        self, runs: list[IndexerChunk], queries: IndexQueries, keys: WorkspaceKeys, mark: Mark
    ) -> list[torch.Tensor]:
        """The best of the own shard, packed for the exchange."""
        found = []
        order = self.selector.shard_order(0)
        for run, logits in self.logits(runs, queries, keys, mark):
            kept = topk(logits, run.key_start, run.key_end, self.selector.topk, backend=self.backend)
            found.append(packed_candidates(kept, logits, run.key_start, order, backend=self.backend))
            mark("top-k")
        return found

    def select_listed(
        self, runs: list[IndexerChunk], queries: IndexQueries, keys: WorkspaceKeys, mark: Mark
    ) -> list[torch.Tensor]:
        """Both at once; on Hopper logits are never all in memory."""
        part = queries.part(runs[0].token_start, runs[-1].token_stop)
        start, end = torch.cat([run.key_start for run in runs]), torch.cat([run.key_end for run in runs])
        found = indexer_topk(part.q, keys, part.weights, start, end, self.selector.topk, backend=self.backend)
        mark("logits and top-k")
        return [found]

    def logits(
        self, runs: list[IndexerChunk], queries: IndexQueries, keys: WorkspaceKeys, mark: Mark
    ) -> Iterator[tuple[IndexerChunk, torch.Tensor]]:
        """Logits of one run after another, all in the same memory."""
        out: torch.Tensor | None = None
        for run in runs:
            part = queries.part(run.token_start, run.token_stop)
            if out is None:
                num_keys = keys.num_keys if isinstance(keys, KeyShards) else len(keys[1])
                out = torch.empty(len(part.q), num_keys, device=self.comm.device)
            rows = out[: len(part.q)]
            mqa_logits(part.q, keys, part.weights, run.key_start, run.key_end, out=rows, backend=self.backend)
            mark("logits")
            yield run, rows

    def num_scores(self) -> int:
        """Pairs of a query token and a key that it may see."""
        return sum(int((run.key_end.long() - run.key_start).sum()) for runs, _ in self.sets for run in runs)

    def num_keys(self) -> int:
        """Keys of this rank's pages that come into its workspaces, or into those of all ranks."""
        return sum(table.num_keys for _, table in self.sets)

    def _write_earlier(self, keys: torch.Tensor) -> None:
        topology, position = self.places.plan.topology, np.arange(len(keys))
        slots = sharded_slots(
            position,
            np.zeros_like(position),
            self.places.tables,
            block_size=topology.block_size,
            dcp_size=topology.dcp,
            dcp_rank=self.places.rank.dcp_rank,
            interleave=topology.interleave,
        )
        self.caches.insert_index(keys, torch.from_numpy(slots).to(keys.device))


class PeerStep(RankStep):
    """On one GPU by published kernels: vllm's insert, gather and top-k, DeepGEMM's logits. Queries are ours."""

    deep_gemm: Any = None

    @property
    def ways(self) -> tuple[str, ...]:
        """What the peers do: they write logits."""
        return ("written",)

    def insert(self) -> None:
        """Write the step's keys."""
        view = self.cache.view(-1, BLOCK, 132)
        torch.ops._C_cache_ops.indexer_k_quant_and_cache(self.new_keys, view, self.slots, 128, "fp32")

    def workspace(self, table: KeyTable) -> IndexKeys:
        """Keys side by side."""
        values = torch.empty(table.num_keys, 128, dtype=torch.float8_e4m3fn, device=self.cache.device)
        scales = torch.empty(table.num_keys, 4, dtype=torch.uint8, device=self.cache.device)
        torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache(
            self.cache.view(-1, BLOCK, 132), values, scales, table.block_tables, table.local_start
        )
        return values, scales.view(torch.float32).view(-1)

    def select_written(
        self, runs: list[IndexerChunk], queries: IndexQueries, keys: IndexKeys, mark: Mark
    ) -> list[torch.Tensor]:
        """Logits and top-k of the runs that cpkit takes."""
        found = []
        for run in runs:
            part = queries.part(run.token_start, run.token_stop)
            bounds = run.key_start, run.key_end
            logits = self.deep_gemm.fp8_fp4_mqa_logits((part.q, None), keys, part.weights, *bounds, len(keys[1]))
            mark("logits")
            out = torch.empty(len(part.q), self.selector.topk, dtype=torch.int32, device=self.cache.device)
            torch.ops._C.top_k_per_row_prefill(
                logits, *bounds, out, len(out), logits.stride(0), logits.stride(1), self.selector.topk
            )
            mark("top-k")
            found.append(out)
        return found
