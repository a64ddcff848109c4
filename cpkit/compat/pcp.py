"""Upstream's prefill context parallelism: the partition, a rank's whole batch, and the layout of a gathered chunk."""

from dataclasses import dataclass

import numpy as np
import torch

from cpkit.arrays import BoolArray, IntArray, prefix_sum
from cpkit.batch import Batch
from cpkit.compat.convert import RefusedAssertionError, bools, flags, int32, int64, ints, refuse_as
from cpkit.errors import PlanError
from cpkit.planner.gather import GatherPlan
from cpkit.planner.interleave import largest_shard
from cpkit.planner.layout import flat_tokens, gather_layout, padded_tokens
from cpkit.planner.order import request_row_bounds
from cpkit.planner.partition import Partition, partition_queries, too_short
from cpkit.planner.rows import rank_rows
from cpkit.planner.slots import PAD

STRATEGY = "head_tail"
"""The partition that upstream has: dual chunk swap."""


@dataclass
class PCPGlobalChunkPlan:
    """How the DCP shards of a chunk become one buffer in token order, in upstream's names.

    row_start_cu: [rows + 1] int32, start of each row's request, then the total. global_cu, padded_local_cu: [rows + 1]
    int32, running extents to which only a request's first row adds, of the whole and of one rank's padded shard.
    deinterleave_idx: [total] int64, place of each global key in the rank-major gathered buffer.
    """

    row_start_cu: torch.Tensor
    global_cu: torch.Tensor
    padded_local_cu: torch.Tensor
    padded_local_total: int
    total: int
    deinterleave_idx: torch.Tensor


def build_pcp_global_chunk_plan(
    row_req_idx: torch.Tensor, row_shard_rows: torch.Tensor, dcp_world_size: int, interleave: int
) -> PCPGlobalChunkPlan:
    """The layout of one chunk's rows; only the shard size of a request's first row is read, as upstream does.

    AssertionError: no rows, a request whose rows are not adjacent, or one without keys.
    """
    with refuse_as(RefusedAssertionError):
        bounds = request_row_bounds(ints(row_req_idx))
    shard_keys = ints(row_shard_rows)[bounds[:-1]]
    if (shard_keys <= 0).any():
        req = int(ints(row_req_idx)[bounds[:-1]][shard_keys <= 0][0])
        raise RefusedAssertionError(f"request {req} has no keys: a chunk gathers keys of each of its requests")
    row_region = np.repeat(np.arange(len(shard_keys)), np.diff(bounds))
    plan = GatherPlan(dcp_world_size, interleave, 0, shard_keys, row_region)
    first_row_keys = np.zeros(len(row_region), np.int64)
    first_row_keys[bounds[:-1]] = shard_keys
    return PCPGlobalChunkPlan(
        row_start_cu=int32(np.append(plan.region_start()[row_region], plan.num_keys), row_req_idx),
        global_cu=int32(prefix_sum(first_row_keys * dcp_world_size), row_req_idx),
        padded_local_cu=int32(prefix_sum(first_row_keys), row_req_idx),
        padded_local_total=plan.keys_per_rank,
        total=plan.num_keys,
        deinterleave_idx=int64(plan.deinterleave_idx(), row_req_idx),
    )


@dataclass
class PCPPartition:
    """Which tokens each PCP rank computes, and how their outputs are put together, in upstream's names.

    replicated: [num_reqs] bool, true for every decode, sharded or not, and under DCP for a prefill too short to be cut,
    one of no tokens included. rank_chunks: per rank (request, offset, length) in request order; rank_segments: per rank
    (request, global start, stop, local start, stop), decodes first.
    hidden_restore_idx: [tokens] int64; padded_gather_idx int64, gathered_kv_write_mask bool and gathered_slot_mapping
    int64: [pcp_world_size * padded_rank_tokens].
    """

    replicated: torch.Tensor
    rank_chunks: list[list[tuple[int, int, int]]]
    rank_segments: list[list[tuple[int, int, int, int, int]]]
    per_rank_num_tokens: list[int]
    num_tokens_for_dispatch: int
    padded_rank_tokens: int
    hidden_restore_idx: torch.Tensor
    padded_gather_idx: torch.Tensor
    gathered_kv_write_mask: torch.Tensor
    gathered_slot_mapping: torch.Tensor


def pcp_partition(
    num_scheduled_tokens: torch.Tensor,
    is_prefilling: torch.Tensor,
    global_slot_mapping: torch.Tensor,
    *,
    pcp_world_size: int,
    dcp_world_size: int,
    shard_decode_requests: bool,
    padded_num_tokens: int | None = None,
) -> PCPPartition:
    """The head-tail partition of a global batch; ValueError if padded_num_tokens is below the fullest rank."""
    query_lens, replicated = ints(num_scheduled_tokens), ~flags(is_prefilling)
    if dcp_world_size > 1:
        replicated |= too_short(query_lens, pcp_world_size, STRATEGY)
    partition = _partition(query_lens, flags(is_prefilling), pcp_world_size, dcp_world_size, shard_decode_requests)
    layout = gather_layout(partition, padded_num_tokens)
    gathered = np.append(ints(global_slot_mapping), PAD)[layout.gather_idx]  # an empty batch has padding only
    segments = [_segments(partition, rank) for rank in range(pcp_world_size)]
    return PCPPartition(
        replicated=bools(replicated),
        rank_chunks=[sorted(zip(*(part.tolist() for part in rank[:3]), strict=True)) for rank in segments],
        rank_segments=[_token_ranges(*rank, query_lens) for rank in segments],
        per_rank_num_tokens=partition.num_tokens.tolist(),
        num_tokens_for_dispatch=partition.padded,
        padded_rank_tokens=layout.padded,
        hidden_restore_idx=int64(layout.restore_idx, global_slot_mapping),
        padded_gather_idx=int64(layout.gather_idx, global_slot_mapping),
        gathered_kv_write_mask=bools(layout.writes_kv, global_slot_mapping),
        gathered_slot_mapping=int64(np.where(layout.writes_kv, gathered, PAD), global_slot_mapping),
    )


def _partition(
    query_lens: IntArray, is_prefilling: BoolArray, pcp_size: int, dcp_size: int, shard_decodes: bool
) -> Partition:
    return partition_queries(
        query_lens,
        is_prefilling,
        pcp_size=pcp_size,
        dcp_size=dcp_size,
        strategy=STRATEGY,
        shard_decodes=shard_decodes,
    )


def _segments(partition: Partition, rank: int) -> tuple[IntArray, IntArray, IntArray]:
    segments = partition.segments(rank)
    return segments.req, segments.start, segments.count


def _token_ranges(
    req: IntArray, start: IntArray, count: IntArray, query_lens: IntArray
) -> list[tuple[int, int, int, int, int]]:
    """Segments with their ranges of flat tokens, in the global batch and in the rank's."""
    first = prefix_sum(query_lens)[:-1][req] + start
    local = prefix_sum(count)
    columns = (req, first, first + count, local[:-1], local[1:])
    return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass
class PCPRankBatch:
    """One PCP rank's batch, in upstream's names; rows are (request, adjacent tokens), decodes first.

    req_slots: int64, row_num_tokens, row_start_pos, global_query_lens: int32, [rows]. seq_lens int32, row_is_prefilling
    bool, logits_indices int64, shard_rows int32 or None: [rows with graph padding]. query_start_loc: one more, int32.
    local_input_ids int32, local_positions int64, is_padding bool: [tokens with padding].
    """

    req_slots: torch.Tensor
    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int
    row_num_tokens: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    row_start_pos: torch.Tensor
    row_is_prefilling: torch.Tensor
    local_input_ids: torch.Tensor
    local_positions: torch.Tensor
    is_padding: torch.Tensor
    logits_indices: torch.Tensor
    shard_rows: torch.Tensor | None
    global_query_lens: torch.Tensor


def pcp_partition_batch(
    num_scheduled_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_len: torch.Tensor,
    request_slots: torch.Tensor,
    input_ids: torch.Tensor,
    *,
    pcp_rank: int,
    pcp_world_size: int,
    dcp_world_size: int,
    interleave: int,
    shard_decode_requests: bool,
    graph_tokens: int | None = None,
    graph_reqs: int | None = None,
) -> PCPRankBatch:
    """The batch of one PCP rank; ValueError if a captured graph has fewer tokens or rows than needed.

    graph_tokens, graph_reqs: sizes a captured graph promises, or None. A rank with nothing to do keeps one row of zero
    tokens of request 0.
    """
    query_lens, computed = ints(num_scheduled_tokens), ints(num_computed_tokens)
    batch = Batch.from_lens(computed + query_lens, query_lens, ints(prefill_len))  # req_ids: their place before sorting
    partition = _partition(batch.query_lens, batch.is_prefilling, pcp_world_size, dcp_world_size, shard_decode_requests)
    rows = rank_rows(batch, segments := partition.segments(pcp_rank), 0, split_extends=True)
    idle = not rows.total_tokens
    req = np.zeros(1, np.int64) if idle else batch.req_ids[rows.req]
    start_pos = computed[req] if idle else rows.start_pos
    is_prefilling = computed[req] < ints(prefill_len)[req] if idle else rows.is_prefilling

    num_reqs, num_tokens = len(req), rows.total_tokens
    padded = padded_tokens(partition, graph_tokens)
    padded_reqs = num_reqs if graph_reqs is None else graph_reqs
    if padded_reqs < num_reqs:
        raise PlanError(f"graph_reqs={graph_reqs} rows, but pcp_rank={pcp_rank} has {num_reqs}: none can be left out")
    token = flat_tokens(segments, prefix_sum(query_lens)[:-1][batch.req_ids])
    query_start_loc = np.append(rows.query_start_loc, np.full(padded_reqs - num_reqs, num_tokens))
    shard_keys = largest_shard((computed + query_lens)[req], dcp_world_size, interleave)
    return PCPRankBatch(
        req_slots=int64(ints(request_slots)[req]),
        num_reqs=num_reqs,
        num_reqs_after_padding=padded_reqs,
        num_tokens=num_tokens,
        num_tokens_after_padding=padded,
        row_num_tokens=int32(rows.num_tokens),
        query_start_loc=int32(query_start_loc),
        seq_lens=int32(_padded(rows.seq_lens, padded_reqs)),
        row_start_pos=int32(start_pos),
        row_is_prefilling=bools(_padded(is_prefilling, padded_reqs).astype(np.bool_)),
        local_input_ids=int32(_padded(ints(input_ids)[token], padded)),
        local_positions=int64(_padded(rows.positions(), padded)),
        is_padding=bools(np.arange(padded) >= num_tokens),
        logits_indices=int64(query_start_loc[1:] - 1),
        shard_rows=int32(_padded(shard_keys, padded_reqs)) if dcp_world_size > 1 else None,
        global_query_lens=int32(query_lens[req]),
    )


def _padded(values: IntArray | BoolArray, length: int) -> IntArray:
    out = np.zeros(length, np.int64)
    out[: len(values)] = values
    return out
