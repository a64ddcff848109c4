"""Exact top-k by stable sorts of many rows together: the torch backend of topk.py, for any k, on any device.

Scores are negated and sorted upwards, so that equal ones stay in the order of their positions and NaN comes last, with
all that lies outside a row's range:

    range 1 .. 4     1.0  2.0  nan  2.0  9.0        negated, outside is nan     nan  -2.0  nan  -2.0  nan
    k = 3                                           sorted: columns 1 3, then nan        ->  0 2 -1
"""

import torch

TILE_SCORES = 1 << 22
"""Scores that are sorted together: their order takes twice their memory."""


def sorted_topk(logits: torch.Tensor, key_start: torch.Tensor, key_end: torch.Tensor, out: torch.Tensor) -> None:
    """Write the best positions of each row to out [M, k], best first; arguments as checked by topk."""
    out.fill_(-1)
    column = torch.arange(logits.shape[1], device=logits.device)
    tile = max(1, TILE_SCORES // max(len(column), 1))
    for first in range(0, len(logits), tile):
        part = slice(first, first + tile)
        start = key_start[part, None].clamp(min=0)
        outside = (column < start) | (column >= key_end[part, None])
        # 0.0 - x gives one zero for both
        scores, order = (0.0 - logits[part]).masked_fill(outside, float("nan")).sort(dim=1, stable=True)
        best = order[:, : out.shape[1]].int() - start
        out[part, : best.shape[1]] = best.masked_fill(scores[:, : out.shape[1]].isnan(), -1)
