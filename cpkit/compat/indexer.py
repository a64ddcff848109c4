"""Upstream's indexer metadata: prefill chunks and decode lengths."""

from dataclasses import dataclass

import numpy as np
import torch

from cpkit.arrays import IntArray, prefix_sum, spread
from cpkit.compat.convert import int32, ints
from cpkit.compat.pcp import PCPGlobalChunkPlan
from cpkit.planner.decode import expand_block_tables, flatten_decodes, local_decode_lens
from cpkit.planner.interleave import local_lens
from cpkit.planner.key_ranges import chunk_tokens, key_ranges_gathered, key_ranges_local, key_rows


@dataclass
class DeepseekV32IndexerPrefillChunkMetadata:
    """One prefill chunk on one rank, in upstream's names; lengths and rows in states.

    cu_seqlen_ks, cu_seqlen_ke: [queries] int32, gathered keys each query token may score.
    cu_seq_lens, local_cu_seq_lens: [chunk rows + 1] int32, running lengths, of the whole and of this rank (under a
    global plan: padded). token_to_seq: [total_seq_lens] int32, chunk row of each global key.
    token_start, token_end: query tokens in the batch.
    """

    cu_seqlen_ks: torch.Tensor
    cu_seqlen_ke: torch.Tensor
    cu_seq_lens: torch.Tensor
    token_to_seq: torch.Tensor
    total_seq_lens: int
    max_seqlen_k: int
    block_table: torch.Tensor
    token_start: int
    token_end: int
    num_reqs: int
    skip_kv_gather: bool
    local_cu_seq_lens: torch.Tensor
    local_total_seq_lens: int
    max_local_total_seq_lens: int
    pcp_plan: PCPGlobalChunkPlan | None = None


def build_prefill_chunk_metadata(
    start_idx: int,
    end_idx: int,
    query_start_loc_cpu: torch.Tensor,
    uncompressed_seq_lens_cpu: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    query_slice: slice | None = None,
    skip_kv_gather: bool = False,
    dcp_rank: int = 0,
    dcp_world_size: int = 1,
    cp_kv_cache_interleave_size: int = 1,
    pcp_plan: PCPGlobalChunkPlan | None = None,
) -> DeepseekV32IndexerPrefillChunkMetadata | None:
    """Metadata of rows [start_idx, end_idx), None where they have no states at all.

    The interleave counts states. query_slice counts from the chunk's first query and may reach past its last. With
    pcp_plan (of the chunk's rows) the ranges are in the gathered layout and alike on every rank.
    """
    bounds = ints(query_start_loc_cpu)[start_idx : end_idx + 1]
    seq_lens = ints(uncompressed_seq_lens_cpu)[start_idx:end_idx]
    num_keys = seq_lens // compress_ratio
    if not num_keys.sum():
        return None
    span = None if query_slice is None else (query_slice.start, query_slice.stop)
    tokens = chunk_tokens(seq_lens, np.diff(bounds), span)
    if pcp_plan is None:
        world, turn = dcp_world_size, cp_kv_cache_interleave_size
        per_rank = [local_lens(num_keys, rank, world, turn) for rank in range(world)]
        cu_seq_lens, local_cu = prefix_sum(num_keys), prefix_sum(per_rank[dcp_rank])
        most = max(int(lens.sum()) for lens in per_rank)
        ranges = key_ranges_local(
            tokens.position,
            tokens.row,
            local_cu,
            compress_ratio=compress_ratio,
            dcp_size=world,
            dcp_rank=dcp_rank,
            interleave=turn * compress_ratio,
        )
    else:
        cu_seq_lens, local_cu, most = (
            ints(pcp_plan.global_cu),
            ints(pcp_plan.padded_local_cu),
            pcp_plan.padded_local_total,
        )
        region_start = ints(pcp_plan.row_start_cu)
        ranges = key_ranges_gathered(tokens.position, tokens.row, region_start, compress_ratio=compress_ratio)
    return DeepseekV32IndexerPrefillChunkMetadata(
        cu_seqlen_ks=int32(ranges.key_start, block_table),
        cu_seqlen_ke=int32(ranges.key_end, block_table),
        cu_seq_lens=int32(cu_seq_lens, block_table),
        token_to_seq=int32(key_rows(np.diff(cu_seq_lens)), block_table),
        total_seq_lens=int(cu_seq_lens[-1]),
        max_seqlen_k=int(num_keys.max()),
        block_table=block_table[start_idx:end_idx],
        token_start=int(bounds[0]) + tokens.start,
        token_end=int(bounds[0]) + tokens.stop,
        num_reqs=end_idx - start_idx,
        skip_kv_gather=skip_kv_gather or tokens.start > 0,
        local_cu_seq_lens=int32(local_cu, block_table),
        local_total_seq_lens=int(local_cu[-1]),
        max_local_total_seq_lens=most,
        pcp_plan=pcp_plan,
    )


@dataclass
class DecodeTensors:
    """Decode rows as upstream's kernels take them.

    seq_lens: int32, [rows] or [rows, longest query]; block_table: [rows, width] int32; decode_lens: [rows] int32, query
    tokens of each row; path: "uniform", "variable" or "native".
    """

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    decode_lens: torch.Tensor
    batch_size: int
    requires_padding: bool
    path: str


def prepare_decode_tensors(
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    decode_lens: torch.Tensor,
    num_decode_tokens: int,
    use_native: bool,
    next_n: int,
    adaptive: bool = False,
    supports_varlen: bool = False,
    seq_lens_buffer: torch.Tensor | None = None,
) -> DecodeTensors:
    """Decode rows, one per request (native) or one per query token.

    Two traps are upstream's: ragged native rows count back from the longest query, so lengths end up right-aligned, and
    the variable path does not keep lengths at or above 0. seq_lens_buffer: reused memory that expanded lengths land in.
    """
    lens, query_lens = ints(seq_lens), ints(decode_lens)
    num_rows, longest = len(lens), int(query_lens.max(initial=0))
    ragged = bool((query_lens != longest).any())
    if use_native:
        if next_n == 1:
            return DecodeTensors(seq_lens, block_table, decode_lens, num_rows, ragged, "native")
        native = np.maximum(lens[:, None] - longest + 1 + np.arange(longest), 0)
        stored = _stored(native, seq_lens, seq_lens_buffer)
        return DecodeTensors(stored, block_table, decode_lens, num_rows, ragged, "native")
    fills = not ragged and num_rows * longest == num_decode_tokens
    uniform = fills and not supports_varlen and not (adaptive and num_rows > 1)
    flat = flatten_decodes(lens, query_lens, num_rows=num_decode_tokens)
    row_lens = flat.seq_lens if uniform else _unclamped(lens, query_lens, num_decode_tokens)
    return DecodeTensors(
        _stored(row_lens, seq_lens, seq_lens_buffer),
        int32(expand_block_tables(ints(block_table), flat.req), block_table),
        torch.ones(num_decode_tokens, dtype=torch.int32, device=decode_lens.device),
        num_decode_tokens,
        False,
        "uniform" if uniform else "variable",
    )


def _unclamped(lens: IntArray, query_lens: IntArray, num_rows: int) -> IntArray:
    """Per-token lengths without the floor of 0 that the planner keeps: context 0 with 3 query tokens gives -2 -1 0."""
    out = np.zeros(num_rows, np.int64)
    out[: int(query_lens.sum())] = spread(query_lens, lens - query_lens) + 1
    return out


def _stored(lens: IntArray, like: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """The lengths in the head of the reused buffer, its tail zeroed; a tensor of their own without a buffer."""
    values = int32(lens, like)
    if buffer is None:
        return values
    buffer.zero_()
    head = buffer[: values.numel()].view(values.shape)
    head.copy_(values)
    return head


def prepare_global_decode_seq_lens(
    global_seq_lens: torch.Tensor | None, decode_lens: torch.Tensor, num_decode_tokens: int, use_native: bool
) -> torch.Tensor | None:
    """The unsharded lengths beside the decode rows: per row if native or all queries are single tokens, else per token.

    None without DCP. Under graph padding the per-row form has another leading size than the rows, as upstream's does.
    """
    query_lens = ints(decode_lens)
    if global_seq_lens is None or use_native or query_lens.max(initial=0) <= 1:
        return global_seq_lens
    return int32(_unclamped(ints(global_seq_lens), query_lens, num_decode_tokens), global_seq_lens)


def dcp_localize_decode_seq_lens(
    seq_lens: torch.Tensor,
    dcp_world_size: int,
    dcp_rank: int,
    cp_kv_cache_interleave_size: int = 1,
    is_buffer_view: bool = False,
) -> torch.Tensor:
    """Expanded lengths on one DCP rank, int32 in the same shape; written in place if they live in the reused buffer."""
    local = local_decode_lens(
        ints(seq_lens), dcp_size=dcp_world_size, dcp_rank=dcp_rank, interleave=cp_kv_cache_interleave_size
    )
    values = int32(local, seq_lens)
    return seq_lens.copy_(values) if is_buffer_view else values


@dataclass
class VarlenDecodeTensors:
    """Decode rows of one query token each, for kernels that take any number of tokens a request.

    seq_lens: [capacity] int32, the reused buffer; block_table: [num_tokens, width] int32; decode_lens: [num_tokens]
    int32, all 1; indices: [num_tokens] int32, request of each row; per_req_lens: [num_reqs] int32, query tokens.
    """

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    decode_lens: torch.Tensor
    indices: torch.Tensor
    per_req_lens: torch.Tensor


def indexer_decode_metadata_varlen(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_reqs: int,
    num_tokens: int,
    seq_lens_buffer: torch.Tensor,
) -> VarlenDecodeTensors:
    """Per-token lengths, block rows and requests; padding tokens see nothing, their indices count on from num_reqs."""
    query_lens = np.diff(ints(query_start_loc)[: num_reqs + 1])
    flat = flatten_decodes(ints(seq_lens)[:num_reqs], query_lens, num_rows=num_tokens)
    _stored(flat.seq_lens, seq_lens, seq_lens_buffer)
    return VarlenDecodeTensors(
        seq_lens=seq_lens_buffer,
        block_table=int32(expand_block_tables(ints(block_table)[:num_reqs], flat.req), block_table),
        decode_lens=torch.ones(num_tokens, dtype=torch.int32, device=seq_lens.device),
        indices=int32(flat.req, seq_lens),
        per_req_lens=int32(query_lens, seq_lens),
    )
