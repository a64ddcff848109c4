"""A rank's rows: order, lengths and positions against each token looked at alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit.batch import Batch
from cpkit.planner.partition import STRATEGIES, partition_queries
from cpkit.planner.rows import rank_rows
from tests import planner_oracles as oracles


def rows_of(batch, rank, *, threshold=1, split_extends=True, **options):
    options = {"pcp_size": 2, "dcp_size": 1, **options}
    partition = partition_queries(batch.query_lens, batch.is_prefilling, **options)
    return rank_rows(batch, partition.segments(rank), threshold, split_extends=split_extends)


@st.composite
def batches(draw):
    """Decodes of some draft tokens, fresh, extended and resumed prefills, requests without tokens."""
    seq, query, prompt = [], [], []
    for _ in range(draw(st.integers(0, 5))):
        computed, new = draw(st.integers(0, 50)), draw(st.integers(0, 60))
        seq.append(computed + new)
        query.append(new)
        prompt.append(draw(st.integers(0, computed + new)))
    return Batch.from_lens(seq, query, prompt)


@given(
    batch=batches(),
    ranks=st.integers(1, 16),
    dcp=st.sampled_from([1, 2]),
    strategy=st.sampled_from(STRATEGIES),
    threshold=st.integers(1, 4),
)
def test_rows_follow_the_cards(batch, ranks, dcp, strategy, threshold):
    computed = [s - q for s, q in zip(batch.seq_lens.tolist(), batch.query_lens.tolist(), strict=True)]
    prompts = batch.prompt_lens.tolist()
    prefilling = [c < p for c, p in zip(computed, prompts, strict=True)]
    hands = oracles.partition(
        batch.query_lens.tolist(),
        prefilling,
        ranks=ranks,
        dcp=dcp,
        strategy=strategy,
        shard_decodes=ranks > 1 and dcp == 1,
    )
    options = {"pcp_size": ranks, "dcp_size": dcp, "strategy": strategy, "threshold": threshold}
    boundaries = set()
    for rank, hand in enumerate(hands):
        rows = rows_of(batch, rank, **options)
        if not hand:
            assert (rows.req.tolist(), rows.num_tokens.tolist(), rows.seq_lens.tolist()) == ([0], [0], [0])
            assert rows.start_pos.tolist() == (computed[:1] or [0])
            assert (rows.logits_idx.tolist(), rows.num_decodes, rows.total_tokens) == ([-1], 0, 0)
            assert rows.positions().tolist() == rows.reqs().tolist() == []
            continue
        positions = [[computed[req] + token for token in tokens] for req, tokens, _ in hand]
        assert rows.req.tolist() == [req for req, _, _ in hand]
        assert rows.positions().tolist() == [position for row in positions for position in row]
        assert rows.reqs().tolist() == [req for req, tokens, _ in hand for _ in tokens]
        assert rows.seq_lens.tolist() == [row[-1] + 1 for row in positions]
        assert rows.is_prefilling.tolist() == [
            row[0] < prompts[req] for row, (req, _, _) in zip(positions, hand, strict=True)
        ]
        ends = [sum(map(len, positions[: i + 1])) for i in range(len(positions))]
        assert rows.query_start_loc.tolist() == [0, *ends]
        assert rows.logits_idx.tolist() == [end - 1 for end in ends]
        assert rows.total_tokens == ends[-1]
        decodes = 0
        while decodes < len(hand) and len(hand[decodes][1]) <= threshold and not prefilling[hand[decodes][0]]:
            decodes += 1
        assert rows.num_decodes == decodes
        assert rows.num_decode_tokens == sum(map(len, positions[:decodes]))
        boundaries.add(decodes)
    if dcp > 1:
        assert len(boundaries) <= 1  # ranks that merge decodes agree on which rows are decodes


def test_drawn_example():
    batch = Batch.from_lens([10, 9], [1, 7], [9, 9])
    rows = rows_of(batch, 0, shard_decodes=False)
    assert rows.req.tolist() == [0, 1, 1]
    assert rows.positions().tolist() == [9, 2, 3, 8]
    assert rows.query_start_loc.tolist() == [0, 1, 3, 4]
    assert rows.seq_lens.tolist() == [10, 4, 9]
    assert rows.logits_idx.tolist() == [0, 2, 3]


def test_piece_past_the_prompts_end_is_no_decode_on_any_rank():
    # 8 tokens computed again after a preemption, 1 of prompt and 7 already sampled
    batch = Batch.from_lens([8], [8], [1])
    both = [rows_of(batch, rank, threshold=4, dcp_size=2) for rank in range(2)]
    assert [rows.is_prefilling.tolist() for rows in both] == [[True, False], [False, False]]
    assert [rows.num_decodes for rows in both] == [0, 0]


@pytest.mark.parametrize(
    ("split_extends", "num_decodes"), [pytest.param(False, 2, id="one-rank"), pytest.param(True, 1, id="under-pcp")]
)
def test_short_extends_are_prefills_under_pcp_only(split_extends, num_decodes):
    batch = Batch.from_lens([5, 6], [1, 1], [4, 9])
    assert rows_of(batch, 0, pcp_size=1, split_extends=split_extends).num_decodes == num_decodes


def test_mtp_decodes_stay_whole_and_adjacent_under_round_robin():
    batch = Batch.from_lens([9, 12], [3, 12], [6, 12])
    rows = rows_of(batch, 1, threshold=3, dcp_size=2, strategy="round_robin")
    assert rows.positions().tolist() == [6, 7, 8, 1, 3, 5, 7, 9, 11]
    assert (rows.num_decodes, rows.seq_lens.tolist()) == (1, [9, 12])


def test_b15_row_tensors_have_one_leading_size():
    batch = Batch.from_lens([3, 20], [3, 20])
    rows = rows_of(batch, 5, pcp_size=8, strategy="round_robin")
    assert rows.seq_lens.tolist() == [19]  # flat rows 5, 13, 21: the last is token 18 of request 1
    assert {len(rows.req), len(rows.start_pos), len(rows.num_tokens), len(rows.query_start_loc) - 1} == {1}


def test_b51_unequal_decode_lens_keep_their_own_counts():
    batch = Batch.from_lens([10, 11, 12], [2, 1, 2], [8, 10, 10])
    rows = rows_of(batch, 0, threshold=2, shard_decodes=False)
    assert rows.query_start_loc.tolist() == [0, 2, 3, 5]


def test_empty_batch_keeps_a_placeholder():
    batch = Batch.from_lens([], [])
    rows = rows_of(batch, 0)
    assert (rows.req.tolist(), rows.start_pos.tolist(), rows.is_prefilling.tolist()) == ([0], [0], [False])


def test_far_contexts_keep_64_bits():
    batch = Batch.from_lens([(1 << 40), 16_000_000], [1 << 33, 16_000_000])
    rows = rows_of(batch, 0, pcp_size=4)
    assert rows.start_pos.tolist()[:2] == [(1 << 40) - (1 << 33), (1 << 40) - (1 << 30)]
    assert rows.seq_lens.tolist()[1::2] == [1 << 40, 16_000_000]
    assert rows.total_tokens == (1 << 31) + 4_000_000
