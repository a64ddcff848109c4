"""Indexer logits by plain matrix products, a few query tokens at a time, over the keys that these may score.

The formula and the arguments are those of cpkit.kernels.mqa_logits, for any number of heads and values, on any device.
Keys outside a token's range are not written, here NaN, which top-k never chooses.

    key          0 1 2 3 4        tokens 2 3 share a product over keys 0..4, tokens 4 5 one over 0..6
    token 2      x x x . .
    token 3      x x x x .
"""

import torch

TILE_ROWS = 1024
"""Queries (tokens times heads) that share a product."""


def tiled_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    key_scale: torch.Tensor,
    weights: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
) -> torch.Tensor:
    """[M, N] fp32; q: [M, H, D] and keys: [N, D] fp8 e4m3, key_scale: [N], weights: [M, H] fp32, ranges: [M] int32."""
    num_tokens, num_heads, _ = q.shape
    out = torch.full((num_tokens, len(keys)), float("nan"), device=q.device)
    wide = keys.float()
    tile = max(1, TILE_ROWS // num_heads)
    for start in range(0, num_tokens, tile):
        part = slice(start, start + tile)
        first, last = int(key_start[part].min()), int(key_end[part].max())
        if first >= last:
            continue
        scores = q[part].float().flatten(0, 1) @ wide[first:last].T
        by_token = scores.relu_().view(-1, num_heads, last - first)
        logits = torch.bmm(weights[part, None], by_token)[:, 0] * key_scale[first:last]
        key = torch.arange(first, last, device=q.device)
        allowed = (key >= key_start[part, None]) & (key < key_end[part, None])
        out[part, first:last] = logits.masked_fill(~allowed, float("nan"))
    return out
