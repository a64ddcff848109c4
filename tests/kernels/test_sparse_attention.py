"""Attention over chosen keys against a softmax in float64, one token, head and key at a time."""

import math

import numpy as np
import pytest
import torch

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.sparse_attention import (
    KeyRange,
    SelectedKeys,
    sparse_attention,
    sparse_attention_reference,
    used_slots,
)

NAN, INF = float("nan"), float("inf")
BOTH = pytest.mark.parametrize("attend", [sparse_attention, sparse_attention_reference], ids=["tiled", "reference"])


def slow_attention(query, seen, value_dim, scale):
    """query [T, H, D]; seen: per token the list of its key rows. Everything in float64."""
    query = query.double().numpy()
    out = np.zeros((*query.shape[:2], value_dim))
    lse = np.full(query.shape[:2], -np.inf)
    for token, rows in enumerate(seen):
        for head in range(query.shape[1]):
            scores = [scale * math.fsum(query[token, head] * row) for row in rows]
            if scores:
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                total = math.fsum(weights)
                lse[token, head] = top + math.log(total)
                out[token, head] = sum(w * row[:value_dim] for w, row in zip(weights, rows, strict=True)) / total
    return out, lse


def seen_rows(rows, indices):
    rows = rows.double().numpy()
    return [[rows[i] for i in row if 0 <= i < len(rows)] for row in indices.tolist()]


def assert_close(got, want, tol=2e-5):
    for have, should in zip(got, want, strict=True):
        have = have.double().numpy()
        assert have.shape == should.shape
        assert np.array_equal(np.isfinite(have), np.isfinite(should)), "inf or nan in other places"
        finite = np.isfinite(should)
        error = np.where(finite, np.abs(np.where(finite, have, 0) - np.where(finite, should, 0)), 0)
        worst = np.unravel_index(error.argmax(), error.shape) if error.size else None
        assert not error.size or error.max() <= tol, f"{error.max()} at {worst}"


def make(num_tokens, heads, dim, num_rows, k, seed=0):
    rng = np.random.default_rng(seed)
    query = torch.from_numpy(rng.normal(size=(num_tokens, heads, dim))).float()
    rows = torch.from_numpy(rng.normal(size=(num_rows, dim))).float()
    picks = [rng.permutation(max(num_rows, k))[:k] for _ in range(num_tokens)]
    indices = torch.from_numpy(np.array(picks, np.int64).reshape(num_tokens, k))
    indices[rng.random(indices.shape) < 0.3] = -1
    return query, rows, indices


@BOTH
@pytest.mark.parametrize(
    ("num_tokens", "heads", "dim", "value_dim", "num_rows", "k"),
    [
        pytest.param(0, 2, 8, 8, 5, 3, id="no-tokens"),
        pytest.param(1, 1, 576, 512, 9, 7, id="v32"),
        pytest.param(3, 3, 512, 512, 9, 7, id="v4-odd-heads"),
        pytest.param(5, 2, 8, 6, 0, 3, id="no-rows"),
        pytest.param(5, 2, 8, 6, 4, 0, id="no-indices"),
        pytest.param(70, 16, 8, 8, 300, 4, id="tokens-share-no-keys"),
        pytest.param(70, 16, 8, 8, 10, 9, id="tokens-share-all-keys"),
        pytest.param(33, 1, 4, 3, 6, 9, id="indices-past-the-rows"),
    ],
)
def test_selected_keys(attend, num_tokens, heads, dim, value_dim, num_rows, k):
    query, rows, indices = make(num_tokens, heads, dim, num_rows, k)
    got = attend(query, [SelectedKeys(rows, indices)], value_dim=value_dim, softmax_scale=dim**-0.5)
    assert_close(got, slow_attention(query, seen_rows(rows, indices), value_dim, dim**-0.5))


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_key_ranges(attend, dtype):
    query, rows, _ = make(8, 2, 8, 10, 1)
    start = torch.tensor([0, 0, 3, 10, 5, -4, 8, 12], dtype=dtype)
    end = torch.tensor([0, 1, 10, 10, 4, 2, 99, 13], dtype=dtype)
    got = attend(query, [KeyRange(rows, start, end)], value_dim=8, softmax_scale=0.3)
    indices = [[i for i in range(a, b) if 0 <= i < 10] for a, b in zip(start.tolist(), end.tolist(), strict=True)]
    seen = [[rows[i].double().numpy() for i in row] for row in indices]
    assert_close(got, slow_attention(query, seen, 8, 0.3))


@BOTH
def test_one_softmax_over_chosen_keys_window_and_range(attend):
    """Every mix of empty and filled groups; the window's rows are another tensor, and bf16."""
    query, rows, indices = make(6, 2, 8, 12, 5, seed=3)
    _, window_rows, window = make(6, 2, 8, 9, 3, seed=4)
    window_rows = window_rows.bfloat16()
    indices[0], window[1] = -1, -1
    indices[2], window[2] = -1, -1
    start, end = torch.zeros(6).int(), torch.tensor([1, 0, 0, 3, 12, 0]).int()
    groups = [SelectedKeys(rows, indices), SelectedKeys(window_rows, window), KeyRange(rows, start, end)]
    got = attend(query, groups, value_dim=8, softmax_scale=0.5)
    ranges = [[rows[i].double().numpy() for i in range(int(e))] for e in end]
    seen = [a + b + c for a, b, c in zip(seen_rows(rows, indices), seen_rows(window_rows, window), ranges, strict=True)]
    assert not seen[2], "a token without keys among the others"
    assert_close(got, slow_attention(query, seen, 8, 0.5))


@BOTH
def test_nothing_leaks_from_rows_that_a_token_does_not_see(attend):
    query, rows, indices = make(12, 2, 8, 20, 6, seed=5)
    indices[indices == 3] = 4
    rows[3] = NAN  # nobody sees it
    rows[7], rows[11] = NAN, INF
    sees = ((indices == 7) | (indices == 11)).any(1)
    assert sees.any() and not sees.all()
    out, lse = attend(query, [SelectedKeys(rows, indices)], value_dim=8, softmax_scale=0.4)
    clean = rows.nan_to_num(0.0, 0.0, 0.0)
    want_out, want_lse = slow_attention(query, seen_rows(clean, indices), 8, 0.4)
    assert_close((out[~sees], lse[~sees]), (want_out[~sees.numpy()], want_lse[~sees.numpy()]))
    assert out[sees].isnan().any(-1).all()


@BOTH
@pytest.mark.parametrize("num_tokens", [1, 64, 65])
def test_b101_lanes_behind_the_length_have_no_weight(attend, num_tokens):
    query, rows, _ = make(num_tokens, 2, 8, 9, 1, seed=6)
    rows[3:] = NAN
    indices = torch.tensor([[0, 1, 2, -1, -1, -1, -1, -1]] * num_tokens)
    got = attend(query, [SelectedKeys(rows, indices)], value_dim=8, softmax_scale=0.4)
    assert_close(got, slow_attention(query, [list(rows[:3].double().numpy())] * num_tokens, 8, 0.4))


@BOTH
def test_ranges_do_not_leak_either(attend):
    query, rows, _ = make(4, 1, 8, 6, 1)
    rows[4:] = NAN
    start, end = torch.zeros(4).int(), torch.tensor([1, 2, 4, 6]).int()
    out, lse = attend(query, [KeyRange(rows, start, end)], value_dim=8, softmax_scale=1.0)
    assert out[:3].isfinite().all() and lse[:3].isfinite().all() and out[3].isnan().all()


@BOTH
def test_a_key_named_twice_counts_twice(attend):
    query, rows, _ = make(1, 1, 8, 2, 1)
    got = attend(query, [SelectedKeys(rows, torch.tensor([[0, 1, 0]]))], value_dim=8, softmax_scale=1.0)
    assert_close(got, slow_attention(query, [[rows[i].double().numpy() for i in (0, 1, 0)]], 8, 1.0))


@BOTH
def test_scores_beyond_exp_stay_finite(attend):
    query, rows = torch.full((1, 1, 4), 100.0), torch.stack([torch.full((4,), 1.0), torch.full((4,), -1.0)])
    out, lse = attend(query, [SelectedKeys(rows, torch.tensor([[0, 1]]))], value_dim=4, softmax_scale=1.0)
    assert out.tolist() == [[[1.0] * 4]] and lse.tolist() == [[400.0]]


@BOTH
def test_equal_scores_of_exact_data_sum_without_error(attend):
    """2,048 equal weights: the sums are whole numbers below 2^24, so the mean is right to the bit."""
    rows = torch.ones(2048, 4)
    rows[:, 1] = torch.arange(2048.0) % 8
    out, lse = attend(torch.zeros(2, 3, 4), [SelectedKeys(rows, torch.arange(2048).repeat(2, 1))], value_dim=2,
                      softmax_scale=1.0)  # fmt: skip
    if attend is sparse_attention:
        assert (out == torch.tensor([1.0, 3.5])).all()
    assert (out - torch.tensor([1.0, 3.5])).abs().max() < 1e-5 and (lse - math.log(2048)).abs().max() < 1e-6


@BOTH
def test_strided_queries_and_rows(attend):
    query, rows, indices = make(4, 3, 8, 9, 5)
    wide_query, wide_rows = torch.full((4, 6, 20), NAN), torch.full((9, 30), NAN)
    wide_query[:, ::2, 2:10], wide_rows[:, 5:13] = query, rows
    got = attend(wide_query[:, ::2, 2:10], [SelectedKeys(wide_rows[:, 5:13], indices)], value_dim=8, softmax_scale=0.4)
    assert_close(got, slow_attention(query, seen_rows(rows, indices), 8, 0.4))


def test_used_slots():
    indices = torch.tensor([[9, 4, -1], [4, 7, 12]], dtype=torch.int32)
    slots, places = used_slots(indices, 12)
    assert slots.tolist() == [4, 7, 9] and places.tolist() == [[2, 0, -1], [0, 1, -1]]
    slots, places = used_slots(indices, 0)
    assert slots.tolist() == [] and (places == -1).all()
    slots, places = used_slots(torch.zeros(0, 3, dtype=torch.int64), 5)
    assert slots.tolist() == [] and places.shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"value_dim": 9}, PlanError, "value_dim=9", id="more-values-than-key"),
        pytest.param({"keys": [SelectedKeys(torch.ones(2, 7), torch.zeros(1, 1).int())]}, PlanError, "rows", id="dim"),
        pytest.param({"keys": [SelectedKeys(torch.ones(2, 8), torch.zeros(2, 1).int())]}, PlanError, "indices", id="T"),
        pytest.param({"keys": [SelectedKeys(torch.ones(2, 8), torch.zeros(1, 1))]}, PlanError, "indices", id="floats"),
        pytest.param({"query": torch.ones(1, 8)}, PlanError, "query", id="no-heads"),
        pytest.param({"backend": "triton"}, ConfigError, "triton", id="backend-not-built"),
    ],
)
def test_refusals(change, error, words):
    call = {
        "query": torch.ones(1, 1, 8),
        "keys": [SelectedKeys(torch.ones(2, 8), torch.zeros(1, 1).int())],
        "value_dim": 8,
        "softmax_scale": 1.0,
    } | change
    with pytest.raises(error, match=words):
        sparse_attention(**call)
