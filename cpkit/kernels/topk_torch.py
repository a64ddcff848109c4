"""Exact top-k by torch.topk of many rows together: the torch backend of topk.py, for any k, on any device.

torch.topk leaves open which of equal values it picks. So a score and its column become one int64 that compares as they
do, and no two are equal: the score's bits, made to rise with it, above the columns counted backwards.

    range 1 .. 4     column   0    1    2    3    4
                     score    1.0  2.0  nan  2.0  9.0
    k = 3                          1st       2nd              ->  0 2 -1
"""

import torch

TILE_SCORES = 1 << 20
"""Scores that are ranked together: a rank takes twice a score's memory."""
NONE = torch.iinfo(torch.int64).min
"""Below every rank: NaN, and places outside a row's range."""


def sorted_topk(logits: torch.Tensor, key_start: torch.Tensor, key_end: torch.Tensor, out: torch.Tensor) -> None:
    """Write the best positions of each row to out [M, k], best first; arguments as checked by topk."""
    num_keys = logits.shape[1]
    k = min(out.shape[1], num_keys)
    column = torch.arange(num_keys, device=logits.device)
    tile = max(1, TILE_SCORES // max(num_keys, 1))
    out[:, k:] = -1
    for first in range(0, len(logits), tile):
        part = slice(first, first + tile)
        scores, start = logits[part], key_start[part, None].clamp(min=0)
        bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
        rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        ranks = (rising.long() << 32) | (num_keys - 1 - column)
        ranks.masked_fill_((column < start) | (column >= key_end[part, None]) | scores.isnan(), NONE)
        best = ranks.topk(k, dim=1).values
        position = num_keys - 1 - (best & 0xFFFFFFFF) - start
        out[part, :k] = position.masked_fill(best == NONE, -1).int()
