"""Upstream's sliding-window functions: per-token slots and lengths, gather lengths, workspace chunks."""

import numpy as np
import torch

from cpkit.arrays import IntArray
from cpkit.compat.convert import flags, int32, ints
from cpkit.planner.window import (
    Windows,
    causal_windows,
    draft_block_windows,
    draft_index_width,
    window_slots,
    workspace_chunks,
)
from cpkit.planner.window import prefill_gather_lens as gather_lens


def swa_indices_and_lens(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    window_size: int,
    token_offset: int,
    num_tokens: int,
    replay_start: torch.Tensor | None = None,
    index_width: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of each token's window, int32 [num_tokens, index_width], oldest first, then -1; their number, int32.

    Row n is token token_offset + n of the per-token inputs. replay_start: first position a row of the batch still has
    window keys of. index_width: by default window_size. Tokens without a slot see nothing.
    """
    token, req = _tokens(token_to_req_indices, token_offset, num_tokens)
    bounds = ints(query_start_loc)
    pos = token - bounds[req + 1] + ints(seq_lens)[req]
    first = None if replay_start is None else ints(replay_start)[req]
    windows = causal_windows(pos, window_size=window_size, replay_start=first)
    width = window_size if index_width is None else index_width
    return _index_rows(windows, req, is_valid_token[token_offset:][:num_tokens], block_table, block_size, width)


def dspark_noncausal_swa_indices(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    window_size: int,
    token_offset: int,
    num_tokens: int,
    index_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As swa_indices_and_lens, but every token of a row sees the window before its query block and the whole block."""
    _, req = _tokens(token_to_req_indices, token_offset, num_tokens)
    query_lens = np.diff(ints(query_start_loc))
    per_row = draft_block_windows(ints(seq_lens)[: len(query_lens)], query_lens, window_size=window_size)
    windows = Windows(per_row.start[req], per_row.stop[req])
    return _index_rows(windows, req, is_valid_token[token_offset:][:num_tokens], block_table, block_size, index_width)


def _tokens(token_to_req_indices: torch.Tensor, token_offset: int, num_tokens: int) -> tuple[IntArray, IntArray]:
    token = token_offset + np.arange(num_tokens)
    return token, ints(token_to_req_indices)[token]


def _index_rows(
    windows: Windows,
    req: IntArray,
    valid: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots, lens = window_slots(windows, req, ints(block_table), block_size=block_size, width=width, valid=flags(valid))
    return int32(slots, block_table), int32(lens, block_table)


def prefill_gather_lens(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_prefills: int, num_decodes: int, window_size: int
) -> torch.Tensor:
    """[num_prefills] int32, recent keys to gather for each row after num_decodes."""
    rows = slice(num_decodes, num_decodes + num_prefills)
    query_lens = np.diff(ints(query_start_loc))[rows]
    return int32(gather_lens(ints(seq_lens)[rows], query_lens, window_size=window_size), seq_lens)


def get_dspark_swa_index_width(window_size: int, num_speculative_tokens: int) -> int:
    """Padded width of a draft block's index rows."""
    return draft_index_width(window_size, num_speculative_tokens)


def get_prefill_chunk_plan(
    prefill_seq_lens_cpu: torch.Tensor,
    prefill_query_lens_cpu: torch.Tensor,
    window_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    compress_ratio: int,
    prefill_chunk_size: int,
    has_compressed: bool | None = None,
) -> list[tuple[int, int, int, int]]:
    """(first prefill, last + 1, widest compressed part, widest row) of each workspace chunk.

    has_compressed: the layer gathers compressed keys; None stands for compress_ratio > 1.
    """
    compressed = compress_ratio > 1 if has_compressed is None else has_compressed
    chunks = workspace_chunks(
        ints(prefill_seq_lens_cpu),
        ints(prefill_query_lens_cpu),
        window_size=window_size,
        chunk_size=prefill_chunk_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        compress_ratio=compress_ratio if compressed else None,
    )
    return [(start, stop, compressed_keys, keys) for start, stop, compressed_keys, keys in chunks]
