"""Who computes which query tokens, against cards dealt and lists sliced."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError
from cpkit.planner.partition import STRATEGIES, partition_queries, too_short
from tests import planner_oracles as oracles


def rows_of(partition, rank):
    """[(request, query tokens, writes KV), ...] of a rank's segments."""
    segments = partition.segments(rank)
    fields = (segments.req, segments.start, segments.stride, segments.count, segments.writes_kv)
    return [
        (req, [start + stride * j for j in range(count)], writes)
        for req, start, stride, count, writes in zip(*(field.tolist() for field in fields), strict=True)
    ]


def cut(query_lens, prefilling=None, **options):
    prefilling = [True] * len(query_lens) if prefilling is None else prefilling
    options = {"pcp_size": 2, "dcp_size": 1, **options}
    return partition_queries(np.array(query_lens, np.int64), np.array(prefilling, np.bool_), **options)


def tokens_of(partition, rank):
    return [token for _, tokens, _ in rows_of(partition, rank) for token in tokens]


requests = st.lists(st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 5000)), st.booleans()), max_size=6)


@given(
    reqs=requests,
    ranks=st.integers(1, 16),
    dcp=st.sampled_from([1, 2, 16]),
    strategy=st.sampled_from(STRATEGIES),
    wish=st.sampled_from([None, True, False]),
)
@example(reqs=[], ranks=2, dcp=1, strategy="head_tail", wish=None)
@example(reqs=[(0, True), (0, False)], ranks=16, dcp=16, strategy="round_robin", wish=None)
@example(reqs=[(49, True), (50, True)], ranks=4, dcp=4, strategy="head_tail", wish=None)
@example(reqs=[(3, True), (1, True), (5, True)], ranks=4, dcp=2, strategy="round_robin", wish=None)
def test_every_rank_gets_its_cards(reqs, ranks, dcp, strategy, wish):
    query_lens, prefilling = [q for q, _ in reqs], [p for _, p in reqs]
    shard_decodes = wish if dcp == 1 else None
    partition = cut(
        query_lens, prefilling, pcp_size=ranks, dcp_size=dcp, strategy=strategy, shard_decodes=shard_decodes
    )
    if shard_decodes is None:
        shard_decodes = ranks > 1 and dcp == 1
    hands = oracles.partition(
        query_lens, prefilling, ranks=ranks, dcp=dcp, strategy=strategy, shard_decodes=shard_decodes
    )
    assert [rows_of(partition, rank) for rank in range(ranks)] == hands

    held = [sum(len(tokens) for _, tokens, _ in hand) for hand in hands]
    assert partition.num_tokens.tolist() == held
    assert partition.padded == max(held)
    share = [max(sum(len(t) for r, t, _ in hand if r == req) for hand in hands) for req in range(len(reqs))]
    assert partition.largest_share().tolist() == share
    copies = [sum(any(r == req for r, _, _ in hand) for hand in hands) for req in range(len(reqs))]
    if ranks > 1:
        whole = [
            query_lens[req] > 0 and copies[req] == ranks and share[req] == query_lens[req] for req in range(len(reqs))
        ]
        assert partition.replicated[np.array(query_lens, np.int64) > 0].tolist() == [
            w for w, q in zip(whole, query_lens, strict=True) if q
        ]


@settings(max_examples=50)
@given(reqs=requests, ranks=st.integers(1, 16), dcp=st.sampled_from([1, 4]), strategy=st.sampled_from(STRATEGIES))
def test_every_token_has_one_writer_and_one_computer_or_all(reqs, ranks, dcp, strategy):
    partition = cut([q for q, _ in reqs], [p for _, p in reqs], pcp_size=ranks, dcp_size=dcp, strategy=strategy)
    computed, written = {}, {}
    for rank in range(ranks):
        for req, tokens, writes in rows_of(partition, rank):
            for token in tokens:
                computed[req, token] = computed.get((req, token), 0) + 1
                written[req, token] = written.get((req, token), 0) + writes
    assert sorted(computed) == [(req, token) for req, (q, _) in enumerate(reqs) for token in range(q)]
    assert set(written.values()) <= {1}
    assert set(computed.values()) <= {1, ranks}


@pytest.mark.parametrize(
    ("strategy", "pcp_size", "short"),
    [
        pytest.param("head_tail", 2, [1, 2, 3, 5, 6, 9], id="head_tail-2"),
        pytest.param("head_tail_even", 2, [1, 2, 3], id="head_tail_even-2"),
        pytest.param("contiguous", 4, [1, 2, 3, 5, 6, 9], id="contiguous-4"),
        pytest.param("round_robin", 4, [1, 2, 3], id="round_robin-4"),
        pytest.param("head_tail", 1, [1], id="head_tail-1"),
        pytest.param("contiguous", 1, [], id="contiguous-1"),
    ],
)
def test_too_short(strategy, pcp_size, short):
    lens = np.arange(1, 200)
    assert lens[too_short(lens, pcp_size, strategy)].tolist() == short


def test_too_short_reaches_49_over_four_ranks():
    assert np.flatnonzero(too_short(np.arange(1, 5000), 4, "head_tail")).max() + 1 == 49


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pcp_size", [2, 3, 7, 16])
def test_too_short_finds_every_empty_piece(strategy, pcp_size):
    for length in range(1, 300):
        shares = oracles.pieces_of_ranks(list(range(length)), pcp_size, strategy)
        empty = not all(all(share) for share in shares)
        assert too_short(np.array([length]), pcp_size, strategy).tolist() == [empty], length


def test_one_rank_cuts_a_head_tail_prefill_in_two_rows():
    assert rows_of(cut([7], pcp_size=1), 0) == [(0, [0, 1, 2, 3], True), (0, [4, 5, 6], True)]


def test_round_robin_skips_replicated_prefills_in_its_numbering():
    # flat numbering over the first and the last request only: 5 + 4 tokens
    partition = cut([5, 1, 4], pcp_size=2, dcp_size=2, strategy="round_robin")
    assert rows_of(partition, 0) == [(0, [0, 2, 4], True), (1, [0], True), (2, [1, 3], True)]
    assert rows_of(partition, 1) == [(0, [1, 3], True), (1, [0], False), (2, [0, 2], True)]


def test_decodes_are_dealt_in_turn_and_empty_ones_take_no_turn():
    partition = cut([1, 0, 2, 3], [False] * 4)
    assert [rows_of(partition, rank) for rank in range(2)] == [
        [(0, [0], True), (3, [0, 1, 2], True)],
        [(2, [0, 1], True)],
    ]


@pytest.mark.parametrize(
    ("strategy", "pcp_size", "length", "expected"),
    [
        pytest.param("head_tail", 2, 10, [[0, 1, 2, 9], [3, 4, 5, 6, 7, 8]], id="b03-ceil"),
        pytest.param("head_tail_even", 2, 10, [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]], id="b03-even"),
        pytest.param("contiguous", 2, 8, [[0, 1, 2, 3], [4, 5, 6, 7]], id="b29-contiguous"),
        pytest.param("head_tail", 2, 8, [[0, 1, 6, 7], [2, 3, 4, 5]], id="b29-head_tail"),
        pytest.param("head_tail", 2, 5, [[0, 1], [2, 3, 4]], id="b09-tail-piece-is-padding"),
        pytest.param("head_tail", 8, 3, [[0], [1], [2], [], [], [], [], []], id="b11-shorter-than-the-ranks"),
        pytest.param("contiguous", 4, 5, [[0, 1], [2, 3], [4], []], id="b25-rank-with-padding-only"),
        pytest.param("head_tail", 2, 16, [[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))], id="b23-ring-2"),
        pytest.param("round_robin", 8, 16, [[rank, rank + 8] for rank in range(8)], id="b19-two-rows-a-rank"),
    ],
)
def test_shares_by_hand(strategy, pcp_size, length, expected):
    partition = cut([length], pcp_size=pcp_size, strategy=strategy)
    assert [tokens_of(partition, rank) for rank in range(pcp_size)] == expected


@pytest.mark.parametrize(
    ("lens", "pcp_size", "counts"),
    [
        pytest.param([2999], 4, [749, 750, 750, 750], id="b05-length-2999"),
        pytest.param([698], 4, [170, 176, 176, 176], id="b07-length-698"),
        pytest.param([32768], 8, [4096] * 8, id="b17-local-rows"),
        pytest.param([137], 8, [11, 18, 18, 18, 18, 18, 18, 18], id="b27-length-137"),
    ],
)
def test_token_counts_by_hand(lens, pcp_size, counts):
    assert cut(lens, pcp_size=pcp_size).num_tokens.tolist() == counts


def test_b01_two_token_prefill_is_whole_on_both_ranks():
    partition = cut([2], dcp_size=2)
    assert [rows_of(partition, rank) for rank in range(2)] == [[(0, [0, 1], True)], [(0, [0, 1], False)]]


def test_b15_rank_keeps_one_request_only():
    partition = cut([3, 20], pcp_size=8, strategy="round_robin")
    assert rows_of(partition, 5) == [(1, [2, 10, 18], True)]  # flat rows 5, 13, 21


def test_b93_second_requests_tokens_are_counted_from_its_own_start():
    partition = cut([10, 10], pcp_size=1, strategy="contiguous")
    assert rows_of(partition, 0)[1][1][3] == 3  # global row 13


def test_shares_cost_requests_not_tokens():
    partition = cut([1 << 40, (1 << 40) - 1], pcp_size=16)
    assert sum(partition.num_tokens.tolist()) == (1 << 41) - 1
    assert partition.largest_share().tolist() == [1 << 36, 1 << 36]
    for rank in range(16):
        assert len(partition.segments(rank).req) == 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_long_prefills_keep_64_bits(strategy):
    lens = [(1 << 31) + 1, 16_000_000, (1 << 40) - 3]
    partition = cut(lens, pcp_size=5, dcp_size=5, strategy=strategy)
    assert sum(partition.num_tokens.tolist()) == sum(lens)
    for rank in range(5):
        segments = partition.segments(rank)
        last = segments.start + segments.stride * (segments.count - 1)
        assert (last < np.array(lens)[segments.req]).all()
        assert (segments.start >= 0).all()


def test_plan_arrays_are_frozen_copies():
    lens = np.array([4, 6])
    partition = partition_queries(lens, np.array([True, True]), pcp_size=2, dcp_size=1)
    lens[0] = 99
    assert partition.query_lens.tolist() == [4, 6]
    with pytest.raises(ValueError, match="read-only"):
        partition.num_tokens[0] = 1


@pytest.mark.parametrize(
    ("query_lens", "prefilling", "options", "known"),
    [
        pytest.param([2, 3, 9, 1], [False, False, True, False], {"dcp_size": 2}, [0, 0, 1, 1, 1, 3], id="decodes"),
        pytest.param([2, 1], [False, True], {"pcp_size": 4, "dcp_size": 4}, [0, 0], id="short-prefill-travels"),
        pytest.param([2, 3], [False, False], {}, [], id="dealt-out"),
        pytest.param([2, 3], [False, False], {"pcp_size": 1}, [], id="one-rank"),
        pytest.param([0, 5], [False, True], {"dcp_size": 2}, [], id="none"),
    ],
)
def test_known_tokens_come_first_on_every_rank(query_lens, prefilling, options, known):
    partition = cut(query_lens, prefilling, **options)
    assert partition.num_known(np.array(prefilling)) == len(known)
    for rank in range(partition.pcp_size):
        reqs = [req for req, tokens, _ in rows_of(partition, rank) for _ in tokens]
        assert reqs[: len(known)] == known


def test_unknown_strategy_names_the_choices():
    with pytest.raises(
        ConfigError, match="partition 'zigzag': use one of head_tail, head_tail_even, contiguous, round"
    ):
        cut([4], strategy="zigzag")


def test_decodes_are_not_dealt_under_dcp():
    with pytest.raises(ConfigError, match=r"shard_decode_requests with dcp=2: .*use dcp=1"):
        cut([1], [False], dcp_size=2, shard_decodes=True)
    assert cut([1], [False], dcp_size=2, shard_decodes=False).replicated.tolist() == [True]
