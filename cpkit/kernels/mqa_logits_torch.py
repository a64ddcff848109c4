"""Indexer logits by plain matrix products, a few query tokens at a time, over the keys that these may score.

The torch backend of mqa_logits.py: its formula, for any number of heads and values, on any device.

    key          0 1 2 3 4        tokens 2 3 share a product over keys 0..4, tokens 4 5 one over 0..6
    token 2      x x x . .
    token 3      x x x x .
"""

import torch

from cpkit.kernels.mqa_operands import Operands

TILE_ROWS = 1024
"""Queries (tokens times heads) that share a product."""


def tiled_logits(operands: Operands, out: torch.Tensor) -> None:
    """Write the logits inside each token's range to out; arguments as checked by mqa_logits."""
    q, k, k_scale, weights, key_start, key_end = operands.all()
    num_tokens, num_heads, _ = q.shape
    start, end = key_start.clamp(min=0), key_end.clamp(max=len(k))
    wide = k.float()
    tile = max(1, TILE_ROWS // num_heads)
    for first_token in range(0, num_tokens, tile):
        part = slice(first_token, first_token + tile)
        first, last = int(start[part].min()), int(end[part].max())
        if first >= last:
            continue
        scores = q[part].float().flatten(0, 1) @ wide[first:last].T
        by_token = scores.relu_().view(-1, num_heads, last - first)
        logits = torch.bmm(weights[part, None], by_token)[:, 0] * k_scale[first:last]
        key = torch.arange(first, last, device=q.device)
        allowed = (key >= start[part, None]) & (key < end[part, None])
        out[part, first:last] = torch.where(allowed, logits, out[part, first:last])
