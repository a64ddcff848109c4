"""Causal work: how many keys the query tokens of a rank see, the figure that shows whether ranks are balanced.

A token at position p sees the keys complete by then, (p + 1) // ratio, and of a sliding window the newest
min(p + 1, window_size). Summed over a row by closed forms, never token by token.
ratio=2, window_size=3, positions 1 2 3 4 5:

    keys      1 1 2 2 3    sum  9
    window    2 3 3 3 3    sum 14
"""

from typing import Any

import numpy as np

from cpkit.arrays import IntArray
from cpkit.errors import PlanError
from cpkit.layers import Layer
from cpkit.model import Model
from cpkit.planner.rows import Rows

LARGEST = (1 << 63) - 1
"""The largest sum that int64 holds."""


def causal_work(rows: Rows, model: Model) -> int:
    """Keys that a rank's query tokens see, summed over all layers of a model; raises PlanError above int64."""
    per_layer = layer_work(rows, model)
    total = sum(layer.num_layers * work for layer, work in zip(model.layers, per_layer, strict=True))
    return _checked("causal work of a rank over all layers", total)


def layer_work(rows: Rows, model: Model) -> list[int]:
    """Keys that a rank's query tokens see in one layer of each kind, in model.layers' order; PlanError above int64."""
    ratios = {layer.chunk_ratio for layer in model.layers if layer.compress_ratio}
    windows = {layer.window_size for layer in model.layers if layer.window_size}
    keys = {ratio: int(row_keys(rows, ratio).sum()) for ratio in ratios}
    recent = {window_size: int(row_window(rows, window_size).sum()) for window_size in windows}

    def work(layer: Layer) -> int:
        seen = keys[layer.chunk_ratio] if layer.compress_ratio else 0
        return seen + (recent[layer.window_size] if layer.window_size else 0)

    return [_checked(f"causal work of a {layer.kind} layer", work(layer)) for layer in model.layers]


def row_keys(rows: Rows, ratio: int) -> IntArray:
    """[rows] int64, for each row the sum of (p + 1) // ratio over its positions p; PlanError if they pass int64."""
    kind: Any = object if _is_large(int(rows.seq_lens.max(initial=0)), rows) else np.int64
    out = np.zeros(len(rows.req), kind)
    for stride in np.unique(rows.stride).tolist():
        at = np.flatnonzero(rows.stride == stride)
        out[at] = floor_sum(rows.num_tokens[at].astype(kind), stride, rows.start_pos[at].astype(kind) + 1, ratio)
    return _as_int64(f"keys of ratio {ratio} that a rank's query tokens see", out)


def row_window(rows: Rows, window_size: int) -> IntArray:
    """[rows] int64, for each row the sum of min(p + 1, window_size) over its positions p; PlanError above int64."""
    kind: Any = object if _is_large(window_size, rows) else np.int64
    first, count, stride = (part.astype(kind) for part in (rows.start_pos + 1, rows.num_tokens, rows.stride))
    # the row's first tokens, those with less before them than the window, see 1, 2, ... keys; the others a full window
    growing = np.minimum(np.maximum((window_size - first) // stride + 1, 0), count)
    seen = growing * first + stride * (growing * (growing - 1) // 2) + (count - growing) * window_size
    return _as_int64(f"window keys ({window_size}) that a rank's query tokens see", seen)


def floor_sum(count: Any, step: int, start: Any, divisor: int) -> Any:
    """For each entry the sum of (start + step * j) // divisor over j = 0 .. count - 1.

    count, start: [n] int64 (or Python ints in an object array), start >= 0. Whole multiples are summed as a series; the
    rest are lattice points under a line, whose axes change places until it is flat, as in Euclid's algorithm.

        count 4, step 3, start 1, divisor 2:    1//2 + 4//2 + 7//2 + 10//2 = 0 + 2 + 3 + 5 = 10
    """
    total = np.zeros_like(count)
    while True:
        if whole := step // divisor:
            total += whole * np.where(count % 2 == 0, count // 2 * (count - 1), (count - 1) // 2 * count)
            step -= whole * divisor
        total += count * (start // divisor)
        start = start % divisor
        if not step:
            return total
        # columns of height up to (start + step * count) // divisor: count the same points by rows
        top = start + step * count
        count, start = top // divisor, top % divisor
        step, divisor = divisor, step


def _is_large(most_keys: int, rows: Rows) -> bool:
    """The sum over all tokens, of up to most_keys each, might not fit int64: only Python's integers can tell."""
    return most_keys * int(rows.query_start_loc[-1]) > LARGEST


def _as_int64(name: str, rows: Any) -> IntArray:
    """The same sums as int64; raises PlanError where their total would not fit."""
    if rows.dtype == object:
        _checked(name, sum(rows.tolist()))
    out: IntArray = rows.astype(np.int64)
    return out


def _checked(name: str, total: int) -> int:
    if total > LARGEST:
        raise PlanError(f"{name}: {total} does not fit int64; plan fewer tokens in a step")
    return total
