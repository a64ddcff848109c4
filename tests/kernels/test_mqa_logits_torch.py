"""Tiled logits against one product at a time, at the edges of tiles and ranges."""

import pytest
import torch

from cpkit.kernels import mqa_logits_torch
from cpkit.kernels.mqa_logits import mqa_logits

UNWRITTEN = -77.0


def inputs(num_tokens, num_keys, heads=2, dim=8):
    generator = torch.Generator().manual_seed(num_tokens * 100 + num_keys)

    def whole(*shape):
        return torch.randint(-3, 4, shape, generator=generator).float()

    q, k = whole(num_tokens, heads, dim).to(torch.float8_e4m3fn), whole(num_keys, dim).to(torch.float8_e4m3fn)
    return q, k, 2.0 ** whole(num_keys), whole(num_tokens, heads)


def scored(q, k, scale, weights, starts, ends):
    out = torch.full((len(q), len(k)), UNWRITTEN)
    starts, ends = (torch.tensor(bounds, dtype=torch.int32) for bounds in (starts, ends))
    return mqa_logits(q, (k, scale), weights, starts, ends, out=out, backend="torch")


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("num_keys", [0, 1, 7])
def test_tiled_logits(num_tokens, num_keys, monkeypatch):
    monkeypatch.setattr(mqa_logits_torch, "TILE_ROWS", 8)  # 4 tokens of 2 heads
    q, k, scale, weights = inputs(num_tokens, num_keys)
    starts = [(3 * i) % (num_keys + 1) for i in range(num_tokens)]
    ends = [min(start + i % 4, num_keys) for i, start in enumerate(starts)]
    found = scored(q, k, scale, weights, starts, ends)
    assert found.shape == (num_tokens, num_keys)
    for m in range(num_tokens):
        for n in range(num_keys):
            if not starts[m] <= n < ends[m]:
                assert found[m, n] == UNWRITTEN
                continue
            heads = zip(q[m].float().tolist(), weights[m].tolist(), strict=True)
            expected = sum(
                w * max(0.0, sum(a * b for a, b in zip(row, k[n].float().tolist(), strict=True))) for row, w in heads
            )
            assert float(found[m, n]) == expected * float(scale[n]), (m, n)


def test_keys_outside_the_ranges_are_not_read():
    q, k, scale, weights = inputs(2, 5)
    k[0], k[4] = float("nan"), float("nan")
    found = scored(q, k, scale, weights, [1, 2], [3, 4])
    assert found[0, 1:3].isfinite().all() and found[1, 2:4].isfinite().all()


def test_ranges_are_cut_to_the_keys():
    q, k, scale, weights = inputs(2, 5)
    assert scored(q, k, scale, weights, [-3, 2], [2, 9]).tolist() == [
        [*scored(q, k, scale, weights, [0, 0], [5, 5])[0, :2].tolist(), UNWRITTEN, UNWRITTEN, UNWRITTEN],
        [UNWRITTEN, UNWRITTEN, *scored(q, k, scale, weights, [0, 0], [5, 5])[1, 2:].tolist()],
    ]
