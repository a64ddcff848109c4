"""Packing and choosing candidates in a launch each, against plain sorts of all keys and the bytes of candidates.py."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cpkit.errors import ConfigError, PlanError  # noqa: E402
from cpkit.kernels.candidates import KeyOrder, local_candidates, pack_candidates, unpack_candidates  # noqa: E402
from cpkit.kernels.exchange_candidates import (  # noqa: E402
    best_of_packed,
    join_packed,
    packed_candidates,
    packed_scores,
)

INF, NAN = float("inf"), float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")


def put(values, dtype):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dcp_size", "dcp_rank", "interleave", "first_key"), [(1, 0, 1, 0), (3, 2, 4, 0), (2, 1, 1, 9)]
)
@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
def test_a_rank_packs_scores_and_global_positions(backend, dcp_size, dcp_rank, interleave, first_key, ints):
    rng = np.random.default_rng(dcp_size)
    logits, start = rng.standard_normal((3, 20)).astype(np.float32), [0, 5, 19]
    topk = [[3, 0, -1, 19], [-1, -1, -1, -1], [0, -1, -1, -1]]
    words = put(np.full((3, 7), 99), ints)[:, :4]
    words[:] = put(topk, ints)
    order = KeyOrder(dcp_size, dcp_rank, interleave, first_key)
    got = packed_candidates(words, put(logits, torch.float32), put(start, torch.int32), order, backend=backend)
    for token, kept in enumerate(topk):
        for i, index in enumerate(kept):
            score, position = -INF, -1
            if index >= 0:
                score = logits[token, start[token] + index]
                held = [p for p in range(300) if p // interleave % dcp_size == dcp_rank]
                position = held[first_key + index]
            want = np.float32(score).tobytes() + np.int64(position).tobytes()
            assert got[token, i].cpu().numpy().tobytes() == want
    if ints is torch.int32:
        scores, _ = local_candidates(words, put(logits, torch.float32), put(start, torch.int32), order)
        wider = torch.full((3, 9), NAN, device=DEVICE)[:, 2:6]
        wider[:] = scores.masked_fill(words < 0, NAN)  # what lies beside no key is not read
        assert torch.equal(packed_scores(words, wider, order, backend=backend), got)


def pairs(scores, positions):
    return [sorted(zip(*row, strict=True)) for row in zip(scores.tolist(), positions.tolist(), strict=True)]


def best(scored, k):
    kept = [(score, pos) for score, pos in scored if pos >= 0 and score == score]
    return sorted(kept, key=lambda pair: (-pair[0], pair[1]))[:k]


def expected(scores, positions, k):
    """scores, positions: [lists, tokens, n] -> the k best of each token and the padding behind them, sorted."""
    out = []
    for token in range(scores.shape[1]):
        kept = best(list(zip(scores[:, token].ravel().tolist(), positions[:, token].ravel().tolist(), strict=True)), k)
        out.append(sorted(kept + [(-INF, -1)] * (k - len(kept))))
    return out


def gathered(scores, positions):
    parts = [
        pack_candidates(put(s, torch.float32), put(p, torch.int64)) for s, p in zip(scores, positions, strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["random", "ties", "all-equal", "nan-and-inf", "padding"])
@pytest.mark.parametrize(("lists", "n", "k"), [(1, 1, 1), (1, 5, 3), (2, 4, 4), (3, 7, 16), (8, 5, 5)])
def test_the_best_of_all_lists(backend, kind, lists, n, k):
    rng = np.random.default_rng(lists * n)
    shape = (lists, 3, n)
    scores = {
        "random": lambda: rng.standard_normal(shape),
        "ties": lambda: rng.choice([0.0, -0.0, 1.0, -1.0], shape),
        "all-equal": lambda: np.full(shape, 2.5),
        "nan-and-inf": lambda: rng.choice([NAN, INF, -INF, 0.0], shape),
        "padding": lambda: rng.standard_normal(shape),
    }[kind]().astype(np.float32)
    positions = np.stack([rng.permutation(lists * n) for _ in range(3)], axis=1).reshape(lists, n, 3).transpose(0, 2, 1)
    positions = np.ascontiguousarray(positions, np.int64) + (1 << 33)
    if kind == "padding":
        absent = rng.random(shape) < 0.7
        scores[absent], positions[absent] = -INF, -1
    sent = gathered(scores, positions)
    assert pairs(*best_of_packed(sent, lists, k, backend=backend)) == expected(scores, positions, k)
    assert pairs(*unpack_candidates(join_packed(sent, lists, k, backend=backend))) == expected(scores, positions, k)


def test_more_lists_than_are_compared_at_once(monkeypatch):
    monkeypatch.setattr("cpkit.kernels.exchange_candidates.MOST_AT_ONCE", 16)
    rng = np.random.default_rng(0)
    scores = rng.integers(-2, 3, (9, 4, 6)).astype(np.float32)
    positions = np.tile(rng.permutation(9 * 6).reshape(9, 1, 6), (1, 4, 1)).astype(np.int64)
    sent = gathered(scores, positions)
    assert pairs(*best_of_packed(sent, 9, 6, backend="triton")) == expected(scores, positions, 6)
    assert pairs(*unpack_candidates(join_packed(sent, 9, 6, backend="triton"))) == expected(scores, positions, 6)
    with pytest.raises(PlanError, match="at most 8 of a rank are compared"):
        best_of_packed(gathered(scores[:1].repeat(2, 2), positions[:1].repeat(2, 2)), 1, 6, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lists", [1, 2])
def test_lists_without_candidates_give_padding(backend, lists):
    nothing = torch.zeros(lists * 3, 0, 12, dtype=torch.uint8, device=DEVICE)
    padding = [[(-INF, -1)] * 2] * 3
    assert pairs(*best_of_packed(nothing, lists, 2, backend=backend)) == padding
    assert pairs(*unpack_candidates(join_packed(nothing, lists, 2, backend=backend))) == padding


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_refusals(backend):
    nothing = torch.zeros(0, 4, 12, dtype=torch.uint8, device=DEVICE)
    assert [part.shape for part in best_of_packed(nothing, 2, 3, backend=backend)] == [(0, 3), (0, 3)]
    assert join_packed(nothing, 2, 3, backend=backend).shape == (0, 3, 12)
    with pytest.raises(PlanError, match="3 rows of candidates from 2 ranks"):
        best_of_packed(torch.zeros(3, 4, 12, dtype=torch.uint8, device=DEVICE), 2, 3, backend=backend)
    with pytest.raises(ConfigError, match="torch, triton"):
        best_of_packed(nothing, 2, 3, backend="cuda")
