"""Groups of keys that query tokens attend: of this rank's cache, of a gathered workspace, of the window cache.

A selection names positions; a group (kernels/sparse_attention.py) names rows. Between the two lies the placement:

    selection    position 5 2 0      dcp_size=2, interleave=1
    rank 1       slot of 5 - -       the keys that it stores
    gathered     row of 5 2 0        owner * keys_per_rank + start of the request + local index

A layer without an index attends every complete key: a range of rows for each token, in either layout.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from cpkit.arrays import prefix_sum
from cpkit.builders.indexer_metadata import IndexerChunk
from cpkit.builders.swa_metadata import SwaMetadata
from cpkit.kernels.position_slots import KeyBlocks, gathered_slots, shard_slots
from cpkit.kernels.sparse_attention import KeyRange, Keys, SelectedKeys, sparse_attention, used_slots
from cpkit.kernels.table_slots import table_slots
from cpkit.planner.interleave import local_lens
from cpkit.topology import Shard
from cpkit.worker.caches import LayerCaches
from cpkit.worker.places import Places

Partial = tuple[torch.Tensor, torch.Tensor]
"""Output [tokens, heads, values] and LSE [tokens, heads], fp32, over some of the tokens' keys."""


def attend(q: torch.Tensor, groups: Sequence[Keys], caches: LayerCaches) -> Partial:
    """q: [tokens, heads, dim] bf16, over all groups together."""
    return sparse_attention(q, groups, value_dim=caches.value_dim, softmax_scale=caches.softmax_scale)


def stored_keys(positions: torch.Tensor, places: Places, caches: LayerCaches) -> SelectedKeys:
    """Those of the positions that this rank stores; positions: [tokens, k] int64, of its leading query tokens."""
    device, keys = positions.device, places.plan.shards[caches.layer.compress_ratio]
    slots = torch.empty_like(positions)
    shard_slots(
        positions,
        torch.tensor(places.req[: len(positions)], dtype=torch.int32, device=device),
        KeyBlocks(torch.tensor(places.tables, device=device), caches.states_per_block, caches.states_per_block),
        Shard(dcp_size=keys.dcp_size, dcp_rank=places.rank.dcp_rank, interleave=keys.interleave),
        out=slots,
        backend=caches.backend,
    )
    return _read(slots, caches.num_latent_slots, caches.latent_rows, caches)


def all_stored_keys(tokens: slice, places: Places, caches: LayerCaches) -> KeyRange:
    """Of some query tokens all complete keys that this rank stores; each request's keys are read once.

    dcp_size=2, interleave=1, ratio 1; tokens at position 3 of request 5 and at 0 and 1 of request 8:

        rank 1    rows 0 1 hold positions 1 3 of request 5, row 2 position 1 of request 8        ranges 0-2 2-2 2-3
    """
    ratio, device, topology = caches.layer.compress_ratio, places.device, places.plan.topology
    complete = (places.position[tokens] + 1) // ratio
    held = local_lens(complete, places.rank.dcp_rank, topology.dcp, places.plan.shards[ratio].interleave)
    reqs, region = np.unique(places.req[tokens], return_inverse=True)
    num_keys = np.zeros(len(reqs), np.int64)
    np.maximum.at(num_keys, region, held)
    region_start = prefix_sum(num_keys)
    slots = table_slots(
        torch.tensor(region_start, device=device),
        torch.tensor(places.tables[reqs], device=device),
        torch.tensor(num_keys, device=device),
        int(region_start[-1]),
        block_size=caches.states_per_block,
    )
    start = region_start[region]
    rows = caches.form.unpack(caches.latent_rows(slots))
    return KeyRange(rows, torch.tensor(start, device=device), torch.tensor(start + held, device=device))


def window_keys(metadata: SwaMetadata, tokens: slice, caches: LayerCaches) -> SelectedKeys:
    """The windows of some of the rank's query tokens."""
    parts = [metadata.decode.indices]
    if metadata.prefill is not None:
        parts.append(metadata.prefill.indices)
    return _read(torch.cat(parts)[tokens], caches.num_window_slots, caches.window_rows, caches)


def gathered_keys(
    positions: torch.Tensor, chunk: IndexerChunk, places: Places, rows: torch.Tensor, caches: LayerCaches
) -> SelectedKeys:
    """Those of the positions that lie in a chunk's key span, among rows gathered from all shards.

    positions: [tokens of the chunk, k] int64. rows: [dcp * keys_per_rank, row_bytes] uint8, rank after rank.
    """
    assert chunk.gather is not None, "keys are gathered over ranks under PCP + DCP alone"
    first, stop = chunk.key_span
    region = torch.tensor(chunk.gather.local_start()[chunk.gather.row_region], device=positions.device)
    num_tokens = torch.tensor(places.rank.rows.num_tokens[chunk.row_start : chunk.row_stop], device=positions.device)
    index = torch.empty_like(positions)
    gathered_slots(
        torch.where((positions >= first) & (positions < stop), positions - first, -1),
        region.repeat_interleave(num_tokens),
        Shard(dcp_size=chunk.gather.dcp_size, interleave=chunk.gather.interleave),
        rank_stride=chunk.gather.keys_per_rank,
        out=index,
        backend=caches.backend,
    )
    return SelectedKeys(caches.form.unpack(rows), index)


def all_gathered_keys(span: Sequence[IndexerChunk], rows: torch.Tensor, caches: LayerCaches) -> KeyRange:
    """Of the tokens of a key span, run after run, all complete keys among rows gathered from all shards."""
    start, end = (torch.cat([getattr(run, bound) for run in span]) for bound in ("key_start", "key_end"))
    return KeyRange(caches.form.unpack(rows[span[0].deinterleave_idx()]), start, end)


def _read(
    slots: torch.Tensor, num_slots: int, read: Callable[[torch.Tensor], torch.Tensor], caches: LayerCaches
) -> SelectedKeys:
    """The keys in some slots, each read once, however many tokens attend it."""
    used, indices = used_slots(slots, num_slots)
    return SelectedKeys(caches.form.unpack(read(used)), indices)
