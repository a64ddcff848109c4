"""Upstream's slot mappings: compressed states, kpool tails, and kept positions to physical slots."""

import numpy as np
import torch

from cpkit.arrays import IntArray
from cpkit.compat.batches import token_rows
from cpkit.compat.convert import RefusedIndexError, int32, int64, ints
from cpkit.planner.interleave import split_position
from cpkit.planner.remap import compact_rows, gathered_rows, mapped_requests, shard_rows_of
from cpkit.planner.slots import PAD, tail_slots


def get_compressed_slot_mapping(
    num_tokens: int,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
    out: torch.Tensor | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_kv_cache_interleave_size: int = 1,
) -> torch.Tensor:
    """[num_tokens] int64, the slot of the state that each token completes, -1 for none.

    block_size: states of a block on one rank. out: a reused buffer, set to -1 in full first; its head is returned. A
    token whose own slot_mapping entry is -1 writes nothing. Unlike the planner this refuses nothing: the null block is
    a block like any other, and where seq_len < query_len, divisions truncate towards zero into another block's slot.
    """
    query_lens = np.diff(ints(query_start_loc))
    req = np.repeat(np.arange(len(query_lens)), query_lens)[:num_tokens]
    first = (ints(seq_lens)[: len(query_lens)] - query_lens - ints(query_start_loc)[:-1])[req]
    pos = np.arange(len(req)) + first
    owner, local = split_position(pos, dcp_world_size, cp_kv_cache_interleave_size)
    writes = ((pos + 1) % compress_ratio == 0) & (ints(slot_mapping)[: len(req)] != PAD) & (owner == dcp_rank)
    row = _truncated_div(local, compress_ratio)
    entry = _truncated_div(row, block_size)
    writes &= (entry >= 0) & (entry < block_table.shape[1])

    slots = out if out is not None else torch.empty(num_tokens, dtype=torch.int64, device=query_start_loc.device)
    slots.fill_(PAD)
    block = ints(block_table)[req[writes], entry[writes]]
    token = int64(np.flatnonzero(writes), slots)
    slots[token] = int64(block * block_size + (row - entry * block_size)[writes], slots)
    return slots[:num_tokens]


def _truncated_div(a: IntArray, b: int) -> IntArray:
    """a / b towards zero, as device integers divide."""
    return np.where(a < 0, -(-a // b), a // b)


def compute_kpool_tail_slot_mapping(
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor | None,
    num_actual_tokens: int,
    num_reqs: int,
    kpool: int,
    skip_null_blocks: bool = True,
) -> torch.Tensor:
    """Slots of a copy of slot_mapping with its real tokens mapped into their request's circular block.

    Tokens past the last boundary count to the last request; padding tokens, and all tokens where positions are absent,
    keep their slot. skip_null_blocks=False is the base revision: block 0 is a block like any other. Tokens without any
    request: IndexError.
    """
    out = slot_mapping.clone()
    if positions is None or not num_actual_tokens:
        return out
    if not num_reqs:
        raise RefusedIndexError(f"{num_actual_tokens} tokens and no request: a token's tail block is its request's")
    req = token_rows(ints(query_start_loc)[: num_reqs + 1], np.arange(num_actual_tokens))
    slots = tail_slots(
        ints(positions)[:num_actual_tokens], req, ints(block_table), kpool=kpool, skip_null_blocks=skip_null_blocks
    )
    out[:num_actual_tokens] = int64(slots, out)
    return out


def convert_req_index_to_global_slot(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    block_size: int,
    *,
    block_stride_rows: int | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    idx_mapping: torch.Tensor | None = None,
    prefill_request_ids: torch.Tensor | None = None,
    prefill_workspace_starts: torch.Tensor | None = None,
    prefill_rank_stride: int = 0,
    compact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of kept positions, int32 [tokens, K], and how many of each row are valid, int32 [tokens].

    Decode tokens keep what this rank owns; tokens of a prefill (prefill_request_ids >= 0) address a gathered workspace
    and keep every owner. A local position past the decode block table is dropped in both cases, as upstream does,
    although the gathered row exists. compact: valid slots to the front, in order.
    """
    positions, table = ints(token_indices), ints(block_table)
    req = mapped_requests(ints(req_id), None if idx_mapping is None else ints(idx_mapping))
    rows = shard_rows_of(
        positions,
        req,
        table,
        block_size=block_size,
        dcp_size=dcp_world_size,
        dcp_rank=dcp_rank,
        interleave=interleave,
        block_stride=block_stride_rows,
    )
    if prefill_request_ids is not None and prefill_workspace_starts is not None:
        prefill = ints(prefill_request_ids)
        starts = ints(prefill_workspace_starts)[np.maximum(prefill, 0)]
        gathered = gathered_rows(
            positions,
            starts,
            rank_stride=prefill_rank_stride,
            dcp_size=dcp_world_size,
            interleave=interleave,
            rank_rows=np.iinfo(np.int64).max,
        )
        _, local = split_position(np.maximum(positions, 0), dcp_world_size, interleave)
        gathered = np.where(local // block_size < table.shape[1], gathered, PAD)
        rows = np.where(prefill[:, None] >= 0, gathered, rows)
    counts = (rows != PAD).sum(axis=1)
    if compact:
        rows, counts = compact_rows(rows)
    return int32(rows, token_indices), int32(counts, token_indices)
