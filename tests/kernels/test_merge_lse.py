"""Merged outputs against weights in float64, shard by shard."""

import itertools
import math

import numpy as np
import pytest
import torch

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.merge_lse import apply_sink, lse_weights, mask_empty_rows, merge_lse

INF, NAN = math.inf, math.nan


def slow_merge(outs, lses, base):
    """outs: list of vectors, lses: list of numbers, of one token and head."""
    held = [(out, lse) for out, lse in zip(outs, lses, strict=True) if math.isfinite(lse)]
    if not held:
        return np.zeros(len(outs[0])), -INF
    top = max(lse for _, lse in held)
    weights = [base ** (lse - top) for _, lse in held]
    total = math.fsum(weights)
    merged = sum(w * np.array(out, np.float64) for w, (out, _) in zip(weights, held, strict=True)) / total
    return merged, top + math.log(total) / math.log(base)


def check_merge(outs, lses, base):
    out, lse = merge_lse(outs, lses, base=base)
    assert out.dtype == lse.dtype == torch.float32
    for token, head in itertools.product(range(lses.shape[1]), range(lses.shape[2])):
        want = slow_merge(outs[:, token, head].tolist(), lses[:, token, head].tolist(), {"e": math.e, "2": 2.0}[base])
        assert out[token, head].numpy() == pytest.approx(want[0], rel=1e-5, abs=1e-5)
        assert float(lse[token, head]) == pytest.approx(want[1], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize(
    ("shards", "tokens", "heads", "dim"),
    [
        pytest.param(1, 3, 2, 4, id="one-shard"),
        pytest.param(2, 5, 3, 4, id="two"),
        pytest.param(8, 4, 2, 3, id="eight"),
        pytest.param(3, 0, 2, 4, id="no-tokens"),
    ],
)
def test_any_shard_may_be_empty_for_any_token_and_head(shards, tokens, heads, dim, base):
    rng = np.random.default_rng(shards)
    outs = torch.from_numpy(rng.normal(size=(shards, tokens, heads, dim))).float()
    lses = torch.from_numpy(rng.normal(size=(shards, tokens, heads)) * 20).float()
    for mark in (-INF, INF, NAN):
        empty = torch.from_numpy(rng.random(lses.shape) < 0.25)
        lses[empty] = mark
        outs[empty] = torch.tensor(rng.choice([NAN, INF, -INF])).float()
    check_merge(outs, lses, base)


@pytest.mark.parametrize(
    ("outs", "lses", "base", "want_out", "want_lse"),
    [
        pytest.param([1, 3], [0, 0], "e", 2, math.log(2), id="equal"),
        pytest.param([1, 3], [0, 0], "2", 2, 1, id="equal-base-2"),
        pytest.param([1, 3], [1, 2], "2", 7 / 3, math.log2(6), id="base-2"),
        pytest.param([1, 3], [500, 100], "e", 1, 500, id="far-apart"),
        pytest.param([1, 3], [-500, -501], "e", (1 + 3 / math.e) / (1 + 1 / math.e), -500 + math.log(1 + 1 / math.e),
                     id="both-far-below-0"),
        pytest.param([1, 3], [INF, 2], "e", 3, 2, id="plus-infinity-is-empty"),
        pytest.param([1, 3], [NAN, 2], "e", 3, 2, id="nan-is-empty"),
        pytest.param([2, NAN], [0, -INF], "e", 2, 0, id="b121-nan-output-of-an-empty-shard"),
        pytest.param([NAN, INF], [-INF, NAN], "e", 0, -INF, id="all-empty"),
        pytest.param([1, 0], [math.log(8), math.log(2)], "e", 0.8, math.log(10), id="b123-base-e"),
        pytest.param([1, 0], [3, 1], "2", 0.8, math.log2(10), id="b123-base-2"),
    ],
)  # fmt: skip
def test_by_hand(outs, lses, base, want_out, want_lse):
    out, lse = merge_lse(
        torch.tensor(outs).float().view(-1, 1, 1, 1), torch.tensor(lses).float().view(-1, 1, 1), base=base
    )
    assert out.item() == pytest.approx(want_out, rel=1e-5)
    assert lse.item() == pytest.approx(want_lse, rel=1e-6)


def test_b123_reading_one_base_as_the_other_is_another_answer():
    out, _ = merge_lse(torch.tensor([1.0, 0.0]).view(2, 1, 1, 1), torch.tensor([3.0, 1.0]).view(2, 1, 1), base="e")
    assert out.item() == pytest.approx(0.881, abs=1e-3)


def test_b125_a_chunk_without_keys_changes_nothing():
    outs, lses = torch.tensor([5.0, NAN]).view(2, 1, 1, 1), torch.tensor([1.25, -INF]).view(2, 1, 1)
    out, lse = merge_lse(outs, lses)
    assert out.item() == 5.0 and lse.item() == 1.25


def test_shares_sum_to_one_or_are_zero():
    lses = torch.tensor([[[3.0, -INF]], [[1.0, NAN]]])
    weights, _ = lse_weights(lses)
    assert weights.sum(0).tolist() == [[pytest.approx(1.0), 0.0]]


@pytest.mark.parametrize("base", ["e", "2"])
def test_b109_a_sink_counts_once(base):
    """Two ranks, one key each: logit 0, value 1; sink logit 0 takes a third."""
    log = math.log if base == "e" else math.log2
    out, lse = merge_lse(torch.ones(2, 1, 1, 1), torch.full((2, 1, 1), log(1.0)), base=base)
    assert lse.item() == pytest.approx(log(2))
    assert apply_sink(out, lse, torch.zeros(1), base=base).item() == pytest.approx(2 / 3)
    assert lse.item() == pytest.approx(log(2))


@pytest.mark.parametrize(
    ("lse", "sink", "share"),
    [
        pytest.param(0.0, -INF, 1.0, id="no-sink"),
        pytest.param(500.0, 0.0, 1.0, id="keys-outweigh"),
        pytest.param(-500.0, 0.0, 0.0, id="sink-outweighs"),
        pytest.param(-INF, 0.0, 0.0, id="no-keys"),
        pytest.param(-INF, -INF, 0.0, id="no-keys-and-no-sink"),
        pytest.param(1.0, 2.0, 1 / (1 + math.e), id="between"),
    ],
)
def test_sink(lse, sink, share):
    out = torch.zeros(1, 1, 2) if lse == -INF else torch.tensor([[[1.0, -2.0]]])
    got = apply_sink(out, torch.tensor([[lse]]), torch.tensor([sink]))
    assert got.tolist()[0][0] == pytest.approx([share * v for v in out[0, 0].tolist()])


def test_empty_rows_are_masked_by_token():
    """Two draft tokens of one request: the first sees no key of this shard, the second one."""
    lse = torch.tensor([[NAN, 7.0], [1.0, 2.0]])
    for given in (lse, lse.T.contiguous().T):  # kernels that return [H, num_tokens]
        assert mask_empty_rows(given, torch.tensor([0, 1])).tolist() == [[-INF, -INF], [1.0, 2.0]]


def test_strided_outputs():
    packed = torch.randn(2, 3, 4, 6)
    got = merge_lse(packed[..., :5], packed[..., 5].contiguous())
    want = merge_lse(packed[..., :5].clone(), packed[..., 5].clone())
    assert torch.equal(got[0], want[0])


def test_refusals():
    outs, lses = torch.zeros(2, 1, 1, 3), torch.zeros(2, 1, 1)
    with pytest.raises(ConfigError, match="base '10'"):
        merge_lse(outs, lses, base="10")
    with pytest.raises(ConfigError, match="built for torch"):
        merge_lse(outs, lses, backend="triton")
    with pytest.raises(PlanError, match="outs"):
        merge_lse(outs[:1], lses)
    with pytest.raises(PlanError, match="0 shards"):
        merge_lse(outs[:0], lses[:0])
    with pytest.raises(PlanError, match="sink"):
        apply_sink(torch.zeros(1, 2, 3), torch.zeros(1, 2), torch.zeros(3))
    with pytest.raises(PlanError, match="num_keys"):
        mask_empty_rows(torch.zeros(2, 1), torch.zeros(1).long())
