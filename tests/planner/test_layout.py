"""The padded gather and the way back, against lists laid out rank after rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.planner.layout import flat_tokens, gather_layout, padded_tokens
from cpkit.planner.partition import STRATEGIES, partition_queries
from tests import planner_oracles as oracles


def cut(query_lens, prefilling=None, **options):
    prefilling = [True] * len(query_lens) if prefilling is None else prefilling
    options = {"pcp_size": 2, "dcp_size": 1, **options}
    return partition_queries(np.array(query_lens, np.int64), np.array(prefilling, np.bool_), **options)


def laid_out(hands, query_lens, padded):
    """gathered flat tokens (0 where padding) and writing places, from each rank's rows."""
    starts = [sum(query_lens[:i]) for i in range(len(query_lens))]
    gathered, writes = [], []
    for hand in hands:
        tokens = [starts[req] + token for req, row, _ in hand for token in row]
        wrote = [writing for _, row, writing in hand for _ in row]
        gathered += tokens + [0] * (padded - len(tokens))
        writes += wrote + [False] * (padded - len(tokens))
    return gathered, writes


@given(
    reqs=st.lists(st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 5000)), st.booleans()), max_size=5),
    ranks=st.integers(1, 16),
    dcp=st.sampled_from([1, 2]),
    strategy=st.sampled_from(STRATEGIES),
    extra=st.one_of(st.none(), st.integers(0, 70)),
)
def test_gather_then_restore_is_the_batch(reqs, ranks, dcp, strategy, extra):
    query_lens, prefilling = [q for q, _ in reqs], [p for _, p in reqs]
    partition = cut(query_lens, prefilling, pcp_size=ranks, dcp_size=dcp, strategy=strategy)
    layout = gather_layout(partition, None if extra is None else partition.padded + extra)
    batch = np.random.default_rng(0).permutation(sum(query_lens)) + 1
    if len(batch):
        assert (batch[layout.gather_idx][layout.restore_idx] == batch).all()

    shard_decodes = ranks > 1 and dcp == 1
    hands = oracles.partition(
        query_lens, prefilling, ranks=ranks, dcp=dcp, strategy=strategy, shard_decodes=shard_decodes
    )
    widest = max(sum(len(row) for _, row, _ in hand) for hand in hands)
    assert layout.padded == widest + (extra or 0)
    gathered, writes = laid_out(hands, query_lens, layout.padded)
    assert layout.gather_idx.tolist() == gathered
    assert layout.writes_kv.tolist() == writes
    assert sorted(layout.gather_idx[layout.writes_kv].tolist()) == list(range(sum(query_lens)))  # one writer a token
    assert layout.writes_kv[layout.restore_idx].all()


@pytest.mark.parametrize(
    ("length", "options", "gather_idx", "restore_idx"),
    [
        pytest.param(7, {}, [0, 1, 6, 0, 2, 3, 4, 5], [0, 1, 4, 5, 6, 7, 2], id="drawn-example"),
        pytest.param(5, {}, [0, 1, 0, 2, 3, 4], [0, 1, 3, 4, 5], id="b49-padding-inside-the-gathered-rows"),
        pytest.param(1, {}, [0, 0], [0], id="one-token"),
        pytest.param(0, {}, [], [], id="no-tokens"),
        pytest.param(5, {"pcp_size": 4, "strategy": "contiguous"}, [0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 3, 4],
                     id="b25-ranks-with-padding-only"),
        pytest.param(2, {"dcp_size": 2}, [0, 1, 0, 1], [0, 1], id="b01-replicated"),
    ],
)  # fmt: skip
def test_layout_by_hand(length, options, gather_idx, restore_idx):
    layout = gather_layout(cut([length], **options))
    assert layout.gather_idx.tolist() == gather_idx
    assert layout.restore_idx.tolist() == restore_idx


def test_b09_next_token_is_found_through_the_restore_index():
    layout = gather_layout(cut([5]), padded=4)
    assert layout.gather_idx.tolist() == [0, 1, 0, 0, 2, 3, 4, 0]
    places = layout.restore_idx.tolist()
    assert divmod(places[2], layout.padded) == (1, 0)  # global token 2, next of rank 0's row 1, is rank 1's row 0


def test_b131_ids_and_hidden_rows_are_gathered_by_one_layout():
    layout = gather_layout(cut([6], strategy="contiguous"))
    ids, hidden = np.arange(6), np.arange(12).reshape(6, 2)
    assert len(ids[layout.gather_idx]) == len(hidden[layout.gather_idx]) == 6


def test_b21_companion_rows_are_padded_together():
    layout = gather_layout(cut([2], pcp_size=4), padded=2)
    assert len(layout.gather_idx) == len(layout.writes_kv) == 8
    assert layout.writes_kv.sum() == 2


def test_decode_row_keeps_its_neighbouring_tokens_under_round_robin():
    partition = cut([3, 4], [False, True], dcp_size=2, strategy="round_robin")
    start = np.array([0, 3])
    assert flat_tokens(partition.segments(0), start).tolist() == [0, 1, 2, 3, 5]
    assert flat_tokens(partition.segments(1), start).tolist() == [0, 1, 2, 4, 6]


def test_padded_never_drops_tokens():
    partition = cut([7])
    assert padded_tokens(partition, 4) == padded_tokens(partition, None) == 4
    with pytest.raises(PlanError, match="padded=3 tokens a rank, but the fullest rank has 4"):
        gather_layout(partition, 3)
