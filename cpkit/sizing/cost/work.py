"""A rank's part of a step in the amounts that kernels cost: read from its plan, never from averages of a batch."""

from dataclasses import dataclass

import numpy as np

from cpkit.arrays import FloatArray, ceil_div
from cpkit.layers import Layer
from cpkit.model import Model
from cpkit.planner.chunks import Chunk
from cpkit.planner.interleave import local_lens
from cpkit.planner.work import row_keys, row_window
from cpkit.step import RankPlan, StepPlan


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """Prefill rows scored together: query tokens, keys that each sees on average, in so many runs of tokens.

    num_keys: keys that the chunk gathers, of all its rows.
    """

    tokens: int
    mean_keys: float
    num_runs: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class RatioWork:
    """Work over keys of one compress ratio.

    decode_keys, prefill_keys: keys of all shards that a token sees on average. local_share: of the step's keys, the
    part that this rank holds. longest_decode: keys of its shard that a decode token sees at most. chunks: of prefill
    rows.
    """

    decode_keys: float
    longest_decode: float
    prefill_keys: float
    local_share: float
    chunks: tuple[ChunkWork, ...]


@dataclass(frozen=True, slots=True)
class RankWork:
    """Query tokens of a rank by kind of row; work by compress ratio; mean window keys of a token, by window size.

    decode_reads: times that decodes' logits go through a request's keys, once for every two of its tokens.
    """

    decode_tokens: int
    decode_reads: int
    prefill_tokens: int
    ratios: dict[int, RatioWork]
    windows: dict[int, tuple[float, float]]

    @property
    def tokens(self) -> int:
        """All query tokens."""
        return self.decode_tokens + self.prefill_tokens


def rank_work(plan: StepPlan, rank: RankPlan) -> RankWork:
    """Amounts of one rank."""
    rows, model = rank.rows, plan.model
    decode_tokens = rows.num_decode_tokens
    prefill_tokens = rows.total_tokens - decode_tokens
    windows = {}
    for size in {layer.window_size for layer in model.layers if layer.window_size}:
        seen = row_window(rows, size)
        decode, prefill = int(seen[: rows.num_decodes].sum()), int(seen[rows.num_decodes :].sum())
        windows[size] = decode / max(decode_tokens, 1), prefill / max(prefill_tokens, 1)
    return RankWork(
        decode_tokens,
        int(ceil_div(rows.num_tokens[: rows.num_decodes], 2).sum()),
        prefill_tokens,
        {ratio: _ratio_work(plan, rank, ratio) for ratio in needed_ratios(model)},
        windows,
    )


def needed_ratios(model: Model) -> tuple[int, ...]:
    """Ratios that keys are scored or attended in."""
    attended = {layer.compress_ratio for layer in model.layers if layer.compress_ratio}
    return tuple(sorted(attended | set(model.ratios)))


def _ratio_work(plan: StepPlan, rank: RankPlan, ratio: int) -> RatioWork:
    rows, dcp = rank.rows, plan.topology.dcp
    pairs = row_keys(rows, ratio)
    decodes = rows.num_decodes
    share = 1.0
    longest = float(rows.seq_lens[:decodes].max(initial=0) // ratio)
    if dcp > 1:
        shards = plan.shards[ratio]
        held = local_lens(shards.num_keys, rank.dcp_rank, dcp, shards.interleave)
        total = int(shards.num_keys.sum())
        share = float(held.sum()) / total if total else 1.0
        longest *= share
    prefix = np.zeros(len(pairs) - decodes + 1)
    np.cumsum(pairs[decodes:], out=prefix[1:])
    decode_tokens = rows.num_decode_tokens
    prefill_tokens = rows.total_tokens - decode_tokens
    return RatioWork(
        decode_keys=float(pairs[:decodes].sum()) / max(decode_tokens, 1),
        longest_decode=longest,
        prefill_keys=float(prefix[-1]) / max(prefill_tokens, 1),
        local_share=share,
        chunks=_chunks(rank, ratio, prefix),
    )


def _chunks(rank: RankPlan, ratio: int, prefix: FloatArray) -> tuple[ChunkWork, ...]:
    """Chunks with the tokens that this rank has in them; each key span has its part of what its rows see.

    prefix: [prefill rows + 1] float64, keys that the rows before see.
    """
    found: list[ChunkWork] = []
    spans: list[Chunk] = []
    start_loc, decodes = rank.rows.query_start_loc, rank.rows.num_decodes
    for chunk in rank.chunks.get(ratio, ()):
        spans.append(chunk)
        if not chunk.last_span:
            continue
        tokens = int(start_loc[decodes + chunk.row_stop] - start_loc[decodes + chunk.row_start])
        mean = float(prefix[chunk.row_stop] - prefix[chunk.row_start]) / max(tokens, 1)
        runs = max(1, -(-tokens // chunk.run))
        for span in spans if tokens else ():
            part = (span.key_stop - span.key_start) / chunk.key_stop if len(spans) > 1 else 1.0
            found.append(ChunkWork(tokens, max(part * mean, 1.0), runs, span.num_keys))
        spans = []
    return tuple(found)


def attended_keys(layer: Layer, work: RankWork, *, decode: bool, local: bool) -> float:
    """Keys that the attention kernel of a layer goes through for a token; local: of this rank's shard alone.

    An indexer's selection is padded to its k, except where a window is attended with it; a shard holds its part of it.
    """
    window = work.windows[layer.window_size][not decode] if layer.window_size else 0.0
    if not layer.compress_ratio:
        return window
    ratio = work.ratios[layer.compress_ratio]
    seen = ratio.decode_keys if decode else ratio.prefill_keys
    if layer.index:
        picked = layer.index.topk * (layer.index.ratio // layer.compress_ratio)
        seen = min(picked, seen) if layer.window_size else picked
    return seen * (ratio.local_share if local else 1.0) + window
