"""Upstream's batch functions: shard lengths, the decode boundary, row runs, prefill chunks, the token-to-row map."""

from typing import Protocol

import numpy as np
import torch

from cpkit.arrays import IntArray
from cpkit.compat.convert import RefusedAssertionError, RefusedIndexError, flags, int32, int64, ints, refuse_as
from cpkit.planner.chunks import Chunk, split_chunks_keeping_keys, widen
from cpkit.planner.interleave import local_lens
from cpkit.planner.order import request_row_bounds as row_bounds
from cpkit.planner.order import split_decodes_and_prefills as split_batch


class CommonAttentionMetadata(Protocol):
    """The fields of upstream's class of this name that the decode boundary reads."""

    query_start_loc_cpu: torch.Tensor
    is_prefilling: torch.Tensor | None
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int


def get_dcp_local_seq_lens(
    seq_lens: torch.Tensor,
    dcp_size: int = 1,
    dcp_rank: int | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> torch.Tensor:
    """Lengths each DCP rank holds, int32: the shape of seq_lens for one rank, one more axis for all (dcp_rank None).

    Lengths are cast to int32 first, as upstream does: 2^31 becomes negative.
    """
    lens = ints(seq_lens.to(torch.int32))
    if dcp_rank is not None:
        return int32(local_lens(lens, dcp_rank, dcp_size, cp_kv_cache_interleave_size), seq_lens)
    return int32(local_lens(lens[..., None], np.arange(dcp_size), dcp_size, cp_kv_cache_interleave_size), seq_lens)


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> tuple[int, int, int, int]:
    """num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens of a batch ordered decodes first.

    Where the longest query is known to be within the threshold upstream looks no further, so with require_uniform and a
    threshold of 1 an empty row 0 before one-token rows leaves them all decodes.
    """
    batch = common_attn_metadata
    all_short = batch.max_query_len <= decode_threshold and (not require_uniform or decode_threshold <= 1)
    if all_short and treat_short_extends_as_decodes:
        return batch.num_reqs, 0, batch.num_actual_tokens, 0
    query_lens = np.diff(ints(batch.query_start_loc_cpu))
    with refuse_as(RefusedAssertionError if len(query_lens) else RefusedIndexError):
        split = split_batch(
            query_lens,
            None if batch.is_prefilling is None else flags(batch.is_prefilling),
            threshold=decode_threshold,
            num_tokens=batch.num_actual_tokens,
            require_uniform=require_uniform,
            treat_short_extends_as_decodes=treat_short_extends_as_decodes,
        )
    return split


def request_row_bounds(req_idx: torch.Tensor) -> torch.Tensor:
    """[runs + 1] int64, first row of each run of one request's rows, then the row count; else AssertionError."""
    with refuse_as(RefusedAssertionError):
        return int64(row_bounds(ints(req_idx)), req_idx)


def split_indexer_prefill_chunks(
    seq_lens_cpu: torch.Tensor,
    query_lens_cpu: torch.Tensor,
    workspace_size: int,
    max_logits_bytes: int,
    request_offset: int = 0,
) -> list[tuple[slice, slice]]:
    """(request slice, query slice) of each chunk; a lone request over the workspace keeps all its keys."""
    chunks = split_chunks_keeping_keys(
        ints(query_lens_cpu),
        ints(seq_lens_cpu),
        workspace_keys=workspace_size,
        max_logits=max_logits_bytes // 4,
    )
    return _slices(chunks, request_offset)


def split_pcp_dcp_prefill_chunks(
    row_req_idx: torch.Tensor,
    row_shard_rows: torch.Tensor,
    row_query_lens: torch.Tensor,
    dcp_world_size: int,
    workspace_size: int,
    max_logits_bytes: int,
    request_offset: int = 0,
) -> list[tuple[slice, slice]]:
    """(row slice, query slice) of each chunk, alike on every rank: rows of a request count as one, widened back after.

    Only the shard size of a request's first row is read, and its product with the world size is an int32 that may wrap,
    as upstream's does. Query slices may run past a rank's tokens. Rows of a request must be adjacent: AssertionError.
    """
    with refuse_as(RefusedAssertionError):
        bounds = row_bounds(ints(row_req_idx))
    first, rows = bounds[:-1], np.diff(bounds)
    with np.errstate(over="ignore"):
        keys = ints(row_shard_rows).astype(np.int32)[first] * np.int32(dcp_world_size)
    chunks = split_chunks_keeping_keys(
        rows * np.maximum.reduceat(ints(row_query_lens), first),
        keys.astype(np.int64),
        workspace_keys=workspace_size,
        max_logits=max_logits_bytes // 4,
    )
    return _slices(widen(chunks, bounds), request_offset)


def _slices(chunks: list[Chunk], offset: int) -> list[tuple[slice, slice]]:
    return [
        (slice(chunk.row_start + offset, chunk.row_stop + offset), slice(start, stop))
        for chunk in chunks
        for start, stop in chunk.runs()
    ]


def token_to_req_indices(query_start_loc: torch.Tensor, mapped_tokens: int, num_tokens: int) -> torch.Tensor:
    """[num_tokens] int32, row of each token: 0 from mapped_tokens on, the last row past the last boundary."""
    token = np.arange(min(mapped_tokens, num_tokens))
    rows = np.zeros(num_tokens, np.int64)
    rows[: len(token)] = token_rows(ints(query_start_loc), token)
    return int32(rows, query_start_loc)


def token_rows(query_start_loc: IntArray, token: IntArray) -> IntArray:
    """Row of each flat token; tokens past the last boundary count to the last row."""
    row = np.searchsorted(query_start_loc[1:], token, side="right")
    return np.minimum(row, len(query_start_loc) - 2)
