"""Candidates of ranks against a plain sort of all keys."""

import struct

import numpy as np
import pytest
import torch

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.candidates import (
    KeyOrder,
    best_candidates,
    global_topk,
    local_candidates,
    pack_candidates,
    token_order,
    unpack_candidates,
)
from tests.oracles import deal

INF, NAN = float("inf"), float("nan")


def slow_best(scored, k):
    """The k best (score, position) pairs, padded."""
    kept = [(score, pos) for score, pos in scored if pos >= 0 and score == score]
    best = sorted(kept, key=lambda pair: (-pair[0], pair[1]))[:k]
    return best + [(-INF, -1)] * (k - len(best))


def check_rows(got_scores, got_positions, rows, k):
    for scores, positions, scored in zip(got_scores.tolist(), got_positions.tolist(), rows, strict=True):
        assert list(zip(scores, positions, strict=True)) == slow_best(scored, k)


def scores_of(rng, kind, num_keys):
    if kind == "ties":
        return rng.choice([0.0, -0.0, 1.0, -INF], num_keys).tolist()
    if kind == "nan":
        return rng.choice([NAN, 1.0, -INF, INF], num_keys).tolist()
    return np.float32(rng.normal(size=num_keys)).tolist()


@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
@pytest.mark.parametrize("k", [1, 4, 9])
@pytest.mark.parametrize(
    ("ranks", "interleave"),
    [pytest.param(1, 1, id="one-rank"), pytest.param(2, 1, id="two"), pytest.param(3, 4, id="three-turns-of-4")],
)
def test_global_topk_is_the_topk_of_all_keys(ranks, interleave, k, kind):
    """Each rank keeps its own k best; whatever it keeps, the answer is that of the unsharded row."""
    rng = np.random.default_rng(k)
    lens = [0, 1, 3, 8, 9, 40]
    rows = [list(zip(scores_of(rng, kind, length), range(length), strict=True)) for length in lens]
    sent = []
    for rank in range(ranks):
        logits = torch.full((len(lens), 50), NAN)
        topk = torch.full((len(lens), k), -1, dtype=torch.int32)
        start = torch.arange(len(lens), dtype=torch.int32)
        for row, scored in enumerate(rows):
            held = [scored[pos] for pos in deal(len(scored), ranks, interleave)[rank]]
            for index, (score, _) in enumerate(held):
                logits[row, row + index] = score
            best = [pos for _, pos in slow_best([(score, i) for i, (score, _) in enumerate(held)], k)]
            topk[row] = torch.tensor(best)
        mine = local_candidates(topk, logits, start, KeyOrder(ranks, rank, interleave))
        sent.append(pack_candidates(*mine))
    check_rows(*global_topk(torch.cat(sent), ranks, k), rows, k)


def test_b99_half_of_the_best_of_each_rank_is_not_enough():
    scores = [9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0]
    sent = []
    for rank in range(2):
        logits = torch.tensor([scores[rank::2]])
        topk = torch.tensor([[0, 1, 2, 3]] if rank == 0 else [[3, 2, 1, 0]])
        sent.append(pack_candidates(*local_candidates(topk, logits, torch.tensor([0]), KeyOrder(2, rank, 1))))
    assert global_topk(torch.cat(sent), 2, 4)[1].tolist() == [[0, 2, 4, 6]]


def test_b103_local_ids_become_global():
    topk, start = torch.tensor([[0, 1, 2, 3]]), torch.tensor([0])
    _, positions = local_candidates(topk, torch.zeros(1, 4), start, KeyOrder(2, 1, 2))
    assert positions.tolist() == [[2, 3, 6, 7]]


def test_a_later_key_span_counts_on():
    """Key 8 of rank 1's shard, in turns of 2 over 2 ranks, is position 18."""
    scores, positions = local_candidates(
        torch.tensor([[1, 0, -1]], dtype=torch.int32),
        torch.tensor([[NAN, 3.0, 4.0]]),
        torch.tensor([1], dtype=torch.int32),
        KeyOrder(dcp_size=2, dcp_rank=1, interleave=2, first_key=8),
    )
    assert scores.tolist() == [[4.0, 3.0, -INF]] and positions.tolist() == [[19, 18, -1]]


def test_b97_equal_scores_keep_the_lowest_ids():
    num_keys, k = 16_385, 2048
    order = torch.from_numpy(np.random.default_rng(0).permutation(num_keys))
    got = best_candidates(torch.ones(3, num_keys), order.repeat(3, 1), k)[1]
    assert torch.equal(got, torch.arange(k).repeat(3, 1))


def test_neighbouring_ids_above_2_24_and_2_32_stay_apart():
    ids = [2**24 + 1, 2**24, 2**32 + 1, 2**32, 2**53 + 1, 2**53]
    packed = pack_candidates(torch.zeros(1, 6), torch.tensor([ids]))
    assert unpack_candidates(packed)[1].tolist() == [ids]
    assert global_topk(packed, 1, 6)[1].tolist() == [sorted(ids)]
    topk, start = torch.tensor([[2**23]]), torch.tensor([0])
    far = local_candidates(topk, torch.zeros(1, 2**23 + 1), start, KeyOrder(4, 3, 1))
    assert far[1].item() == 2**25 + 3


def test_minus_infinity_at_a_position_comes_before_padding():
    got = best_candidates(torch.tensor([[-INF, NAN, -INF, -INF]]), torch.tensor([[-1, 2, 7, 5]]), 3)
    assert got[1].tolist() == [[5, 7, -1]]


def test_signed_zeros_are_equal():
    got = best_candidates(torch.tensor([[0.0, -0.0, 0.0]]), torch.tensor([[9, 4, 6]]), 2)
    assert got[1].tolist() == [[4, 6]]


def test_a_candidate_is_12_bytes():
    packed = pack_candidates(torch.tensor([[1.5]]), torch.tensor([[2**40 + 3]]))
    assert bytes(packed[0, 0].tolist()) == struct.pack("<fq", 1.5, 2**40 + 3)


@pytest.mark.parametrize(("num_tokens", "n"), [(0, 3), (2, 0)])
def test_nothing_to_choose_from(num_tokens, n):
    packed = pack_candidates(torch.zeros(2 * num_tokens, n), torch.zeros(2 * num_tokens, n, dtype=torch.int64))
    scores, positions = global_topk(packed, 2, 4)
    assert scores.shape == positions.shape == (num_tokens, 4)
    assert (positions == -1).all() and (scores == -INF).all()


def test_no_keys_at_all():
    none = torch.full((2, 3), -1, dtype=torch.int32)
    scores, positions = local_candidates(none, torch.zeros(2, 0), torch.zeros(2, dtype=torch.int32), token_order(0))
    assert (scores == -INF).all() and (positions == -1).all()


def test_refusals():
    with pytest.raises(PlanError, match="3 rows of candidates from 2 ranks"):
        global_topk(torch.zeros(3, 1, 12, dtype=torch.uint8), 2, 1)
    with pytest.raises(PlanError, match="k=0"):
        best_candidates(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64), 0)
    with pytest.raises(PlanError, match="positions"):
        pack_candidates(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(PlanError, match="dcp_rank=2"):
        local_candidates(torch.zeros(1, 1).int(), torch.zeros(1, 1), torch.zeros(1).int(), KeyOrder(2, 2, 1))
    with pytest.raises(ConfigError, match="built for torch"):
        best_candidates(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64), 1, backend="triton")
