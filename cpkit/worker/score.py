"""What the indexer computes on one rank: scores of query tokens against keys, and each token's best keys.

    workspace    keys side by side or in shards, of several requests  prefill    the best at once
    pages        keys where they are stored, of one request each      decode     logits, then the best

Where they are of a part of the keys they become candidates, which carry the position that a key has in its request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpkit.builders.indexer_metadata import IndexerDecode
from cpkit.errors import ConfigError
from cpkit.kernels.candidates import KeyOrder
from cpkit.kernels.checks import check_ranges
from cpkit.kernels.exchange_candidates import packed_candidates
from cpkit.kernels.fp8 import quantize_fp8
from cpkit.kernels.indexer_topk import indexer_topk
from cpkit.kernels.key_shards import WorkspaceKeys
from cpkit.kernels.mqa_logits import NUM_HEADS, mqa_logits
from cpkit.kernels.mqa_operands import HEAD_DIM
from cpkit.kernels.paged_mqa_logits import PAGE_KEYS, paged_mqa_logits
from cpkit.kernels.table_slots import table_slots
from cpkit.kernels.topk import TOPK, topk
from cpkit.layers import Layer
from cpkit.worker.caches import LayerCaches


@dataclass(frozen=True, slots=True, eq=False)
class IndexQueries:
    """q: [tokens, heads, dim] fp8 e4m3; weights: [tokens, heads] fp32, with q's scales folded in."""

    q: torch.Tensor
    weights: torch.Tensor

    def part(self, start: int, stop: int) -> "IndexQueries":
        """Tokens start .. stop."""
        return IndexQueries(self.q[start:stop], self.weights[start:stop])


def quantize_queries(q: torch.Tensor, weights: torch.Tensor, *, backend: str) -> IndexQueries:
    """q: [tokens, heads, dim], weights: [tokens, heads] fp32 with the softmax and head scales folded in."""
    num_tokens, heads, dim = q.shape
    values, scales = quantize_fp8(q.reshape(-1, dim), group_size=dim, backend=backend)
    return IndexQueries(values.view(num_tokens, heads, dim), weights * scales.view(num_tokens, heads))


def workspace_topk(
    queries: IndexQueries,
    keys: WorkspaceKeys,
    bounds: tuple[torch.Tensor, torch.Tensor],
    k: int,
    scores: torch.Tensor | None,
    *,
    workspace_bytes: int,
    backend: str,
) -> torch.Tensor:
    """[tokens, k] int32: the k best keys of each token's range, counted from its start, -1 behind the last.

    bounds: where the ranges start and end. scores: [tokens, k] fp32, takes those of the keys, if they are wanted.
    workspace_bytes: most memory for logits, or for what is kept of them. Raises PlanError for a backward range.
    """
    check_ranges(*bounds)  # waits for the device; the kernels' own check looks on a CPU alone, where that is free
    return indexer_topk(
        queries.q,
        keys,
        queries.weights,
        *bounds,
        k,
        scores=scores,
        backend=backend,
        workspace_bytes=workspace_bytes,
    )


def decode_logits(
    queries: IndexQueries, decode: IndexerDecode, rows: Sequence[slice], caches: LayerCaches, *, backend: str
) -> torch.Tensor:
    """[tokens, most keys of a token] fp32, of the decode tokens, each against its own request's keys from key 0 on.

    rows: tokens of each request. triton reads the keys where they are stored; torch gathers each request's keys first
    and scores them as a workspace.
    """
    assert caches.index is not None, "checked by the caller"
    seq_lens = decode.seq_lens[: len(queries.q)]
    max_keys = int(seq_lens.max())
    if backend == "triton":
        return paged_mqa_logits(
            queries.q[:, None],
            caches.index,
            queries.weights,
            seq_lens,
            decode.block_tables[: len(queries.q)],
            max_keys=max_keys,
            backend=backend,
        )
    out = torch.empty(len(queries.q), max_keys, device=seq_lens.device)
    for tokens in rows:
        end = seq_lens[tokens, 0]
        num_keys = int(end.max())
        slots = table_slots(
            torch.tensor([0, num_keys], device=end.device),
            decode.block_tables[tokens.start : tokens.start + 1],
            torch.tensor([num_keys], device=end.device),
            num_keys,
            block_size=caches.index_block,
        )
        part = queries.part(tokens.start, tokens.stop)
        bounds = torch.zeros_like(end), end
        mqa_logits(part.q, caches.index_keys(slots), part.weights, *bounds, out=out[tokens, :num_keys], backend=backend)
    return out


def best_keys(
    logits: torch.Tensor, key_start: torch.Tensor, key_end: torch.Tensor, k: int, order: KeyOrder, *, backend: str
) -> torch.Tensor:
    """[tokens, k, 12] uint8: candidates, the k best of each token's range of logits, packed as they travel."""
    kept = topk(logits, key_start, key_end, k, backend=backend)
    return packed_candidates(kept, logits, key_start, order, backend=backend)


def check_indexer(layer: Layer, index_block: int, backend: str) -> None:
    """Raise ConfigError where the backend's kernels do not take a layer's indexer."""
    index = layer.index
    if index is None or not layer.runs_index or backend != "triton":
        return
    for what, value, taken in (
        ("index heads", index.num_heads, NUM_HEADS),
        ("values of an index head", index.head_dim, (HEAD_DIM,)),
        ("keys picked", index.topk, TOPK),
        ("keys of a cache block", index_block, (PAGE_KEYS,)),
    ):
        if value not in taken:
            raise ConfigError(
                f"backend='triton' with {value} {what} ({layer.kind}): its kernels take "
                f"{', '.join(map(str, taken))}; backend='torch' takes any"
            )
