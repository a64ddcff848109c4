"""Sliding windows: which positions a query token sees of a cache that keeps only recent keys, and where they lie.

The cache is replicated: a window never goes through the DCP placement.
"""

from typing import NamedTuple

import numpy as np

from cpkit.arrays import BoolArray, IntArray, ceil_div
from cpkit.errors import PlanError
from cpkit.planner.slots import PAD, BlockTables

DRAFT_WIDTH_MULTIPLE = 64
"""Index rows of draft blocks are padded to a multiple of this."""


class Windows(NamedTuple):
    """Half-open ranges of positions, one a query token."""

    start: IntArray  # [num_tokens]
    stop: IntArray  # [num_tokens]


class WindowSlots(NamedTuple):
    """The windows as rows of the paged cache."""

    slots: IntArray  # [num_tokens, width], oldest key first, then PAD
    lens: IntArray  # [num_tokens], keys of each window


class WorkspaceChunk(NamedTuple):
    """Neighbouring prefills whose compressed and recent keys are gathered together."""

    start: int  # first prefill
    stop: int  # after the last
    max_compressed: int  # most compressed keys of one of them
    max_keys: int  # width of the workspace rows: max_compressed + most gathered recent keys


def causal_windows(positions: IntArray, *, window_size: int, replay_start: IntArray | None = None) -> Windows:
    """The last `window_size` positions up to and including each token's own.  window_size=3:

        position   0 1 2 3 4
        start      0 0 0 1 2
        stop       1 2 3 4 5

    positions: [num_tokens] int64. replay_start: [num_tokens] int64, the first position of the token's request that
    still has window keys (bounded replay), or None for position 0. A window never ends before it starts.
    """
    start = np.maximum(positions - window_size + 1, 0 if replay_start is None else np.maximum(replay_start, 0))
    return Windows(np.minimum(start, positions + 1), positions + 1)


def draft_block_windows(seq_lens: IntArray, query_lens: IntArray, *, window_size: int) -> Windows:
    """What every query token of a draft block sees: the window before the block, and the whole block.

    Not causal. window_size=3, a request of seq_len 7 with 2 query tokens: positions 2 .. 6 for both.
    seq_lens, query_lens: [num_reqs] int64; returns [num_reqs] ranges, one a request.
    """
    return Windows(np.maximum(seq_lens - query_lens - window_size, 0), seq_lens)


def draft_index_width(window_size: int, num_speculative_tokens: int) -> int:
    """Width of a draft block's index rows: window and drafts (negatives count as 0), up to a multiple of 64."""
    keys = max(window_size, 0) + max(num_speculative_tokens, 0)
    return int(ceil_div(keys, DRAFT_WIDTH_MULTIPLE)) * DRAFT_WIDTH_MULTIPLE


def window_slots(
    windows: Windows,
    req: IntArray,
    block_tables: BlockTables,
    *,
    block_size: int,
    width: int,
    valid: BoolArray | None = None,
) -> WindowSlots:
    """The keys of each window as slots, oldest first.  block_size=2, width=4, block table 5 3:

        window      [1, 4)               position  0  1  2  3
        slots   11  6  7 -1              slot     10 11  6  7

    req: [num_tokens] int64, row of block_tables. valid: [num_tokens] bool, False for tokens without a slot of their
    own, which see nothing (default: all True). Raises PlanError: a window wider than `width`, or past its block table.
    """
    lens = np.maximum(windows.stop - windows.start, 0)
    if valid is not None:
        lens = np.where(valid, lens, 0)
    if len(lens) and lens.max() > width:
        i = int(lens.argmax())
        raise PlanError(f"token {i} sees {int(lens[i])} keys and an index row holds {width}: widen the rows")
    column = np.arange(width)
    seen = column < lens[:, None]
    entry, offset = np.divmod(np.where(seen, windows.start[:, None] + column, 0), block_size)
    if not seen.any():
        return WindowSlots(np.full(seen.shape, PAD, np.int64), lens)
    if entry.max() >= block_tables.shape[1]:
        token = int(np.argwhere(entry >= block_tables.shape[1])[0, 0])
        raise PlanError(
            f"request {int(req[token])}: position {int(windows.stop[token]) - 1} needs entry {int(entry[token].max())} "
            f"of a block table that is {block_tables.shape[1]} wide"
        )
    slots = block_tables[req[:, None], entry].astype(np.int64) * block_size + offset
    return WindowSlots(np.where(seen, slots, PAD), lens)


def prefill_gather_lens(
    seq_lens: IntArray, query_lens: IntArray, *, window_size: int, replay_start: IntArray | None = None
) -> IntArray:
    """[num_prefills] int64, recent keys to gather for a prefill: its query tokens and what the first of them sees.

    window_size=3: 5 query tokens behind a prefix of 1 need 6 keys, behind a prefix of 9 they need 7.
    replay_start: [num_prefills] int64, first position that still has window keys, or None.
    """
    prefix = seq_lens - query_lens
    if replay_start is not None:
        prefix = np.maximum(prefix - replay_start, 0)
    lens: IntArray = query_lens + np.minimum(prefix, window_size - 1)
    return lens


def workspace_chunks(
    seq_lens: IntArray,
    query_lens: IntArray,
    *,
    window_size: int,
    chunk_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    compress_ratio: int | None = None,
) -> list[WorkspaceChunk]:
    """Neighbouring prefills that share a workspace sized for `chunk_size` prefills of the largest kind.

    A chunk of n prefills takes n rows of max_keys keys; prefills join while that fits, the first in any case.
    seq_lens, query_lens: [num_prefills] int64. compress_ratio: tokens of a compressed key, None where the layer gathers
    no compressed keys.
    """
    gather_lens = prefill_gather_lens(seq_lens, query_lens, window_size=window_size)
    largest = window_size + max_num_batched_tokens
    compressed = np.zeros_like(seq_lens)
    if compress_ratio is not None:
        compressed = seq_lens // compress_ratio
        largest += int(ceil_div(max_model_len, compress_ratio))
    chunks: list[WorkspaceChunk] = []
    for i, (keys, gathered) in enumerate(zip(compressed.tolist(), gather_lens.tolist(), strict=True)):
        if chunks:
            last = chunks[-1]
            most = max(last.max_compressed, keys)
            width = most + max(last.max_keys - last.max_compressed, gathered)
            if (i + 1 - last.start) * width <= chunk_size * largest:
                chunks[-1] = WorkspaceChunk(last.start, i + 1, most, width)
                continue
        chunks.append(WorkspaceChunk(i, i + 1, keys, keys + gathered))
    return chunks
