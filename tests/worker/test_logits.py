"""Tiled logits against one product at a time, at the edges of tiles and ranges."""

import pytest
import torch

from cpkit.worker import logits
from cpkit.worker.logits import tiled_logits


def inputs(num_tokens, num_keys, heads=2, dim=8):
    generator = torch.Generator().manual_seed(num_tokens * 100 + num_keys)

    def whole(*shape):
        return torch.randint(-3, 4, shape, generator=generator).float()

    q, k = whole(num_tokens, heads, dim).to(torch.float8_e4m3fn), whole(num_keys, dim).to(torch.float8_e4m3fn)
    return q, k, 2.0 ** whole(num_keys), whole(num_tokens, heads)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("num_keys", [0, 1, 7])
def test_tiled_logits(num_tokens, num_keys, monkeypatch):
    monkeypatch.setattr(logits, "TILE_ROWS", 8)  # 4 tokens of 2 heads
    q, k, scale, weights = inputs(num_tokens, num_keys)
    starts = [(3 * i) % (num_keys + 1) for i in range(num_tokens)]
    ends = [min(start + i % 4, num_keys) for i, start in enumerate(starts)]
    found = tiled_logits(q, k, scale, weights, torch.tensor(starts).int(), torch.tensor(ends).int())
    assert found.shape == (num_tokens, num_keys)
    for m in range(num_tokens):
        for n in range(num_keys):
            if not starts[m] <= n < ends[m]:
                assert found[m, n].isnan()
                continue
            heads = zip(q[m].float().tolist(), weights[m].tolist(), strict=True)
            expected = sum(
                w * max(0.0, sum(a * b for a, b in zip(row, k[n].float().tolist(), strict=True))) for row, w in heads
            )
            assert float(found[m, n]) == expected * float(scale[n]), (m, n)


def test_keys_outside_the_ranges_are_not_read():
    q, k, scale, weights = inputs(2, 5)
    k[0], k[4] = float("nan"), float("nan")
    found = tiled_logits(q, k, scale, weights, torch.tensor([1, 2]).int(), torch.tensor([3, 4]).int())
    assert found[0, 1:3].isfinite().all() and found[1, 2:4].isfinite().all()
