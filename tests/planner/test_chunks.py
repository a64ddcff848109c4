"""Chunks against a greedy count request by request, and every pair of query and key marked once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.planner.chunks import split_chunks, split_chunks_keeping_keys, widen
from tests.planner_oracles import greedy_chunks


def split(query_lens, context_keys, workspace, max_logits, unit=1):
    """unit: None for rows that keep their keys."""
    rows = np.array(query_lens, np.int64), np.array(context_keys, np.int64)
    budgets = {"workspace_keys": workspace, "max_logits": max_logits}
    return (
        split_chunks_keeping_keys(*rows, **budgets) if unit is None else split_chunks(*rows, **budgets, span_unit=unit)
    )


def entries(chunks):
    """[(rows, keys, query runs), ...]"""
    return [
        (list(range(c.row_start, c.row_stop)), (c.key_start, c.key_stop), [stop - start for start, stop in c.runs()])
        for c in chunks
    ]


rows = st.lists(
    st.tuples(st.one_of(st.integers(0, 8), st.integers(0, 60)), st.one_of(st.integers(0, 8), st.integers(0, 80))),
    max_size=12,
)


@given(rows=rows, workspace=st.integers(1, 100), max_logits=st.integers(1, 600), unit=st.sampled_from([None, 1, 2, 6]))
def test_chunks_grow_request_by_request(rows, workspace, max_logits, unit):
    query_lens, context_keys = [q for q, _ in rows], [k for _, k in rows]
    if unit is not None and min(workspace, max_logits) < unit:
        workspace, max_logits = workspace + unit, max_logits + unit
    chunks = split(query_lens, context_keys, workspace, max_logits, unit)
    truth = greedy_chunks(query_lens, context_keys, workspace=workspace, max_logits=max_logits, unit=unit)
    assert [(r, keys) for r, keys, _ in entries(chunks)] == [(r, keys) for r, keys, _ in truth]
    for chunk, (members, _, run) in zip(chunks, truth, strict=True):
        assert chunk.num_queries == sum(query_lens[i] for i in members)
        assert chunk.run == (chunk.num_queries if run is None else run)
    last = {chunk.row_start: i for i, chunk in enumerate(chunks)}
    assert [chunk.last_span for chunk in chunks] == [last[c.row_start] == i for i, c in enumerate(chunks)]


@given(rows=rows, workspace=st.integers(6, 100), max_logits=st.integers(6, 600), unit=st.sampled_from([1, 2, 6]))
def test_every_query_meets_every_key_once_within_the_budgets(rows, workspace, max_logits, unit):
    met = [np.zeros(row, np.int64) for row in rows]
    for chunk in split([q for q, _ in rows], [k for _, k in rows], workspace, max_logits, unit):
        members = range(chunk.row_start, chunk.row_stop)
        queries = [(row, q) for row in members for q in range(rows[row][0])]
        gathered = sum(min(rows[row][1], chunk.key_stop) - chunk.key_start for row in members)
        assert chunk.num_keys == gathered <= workspace
        assert chunk.key_start % unit == 0
        most = 0
        for start, stop in chunk.runs():
            most = max(most, (stop - start) * gathered)
            for row, q in queries[start:stop]:
                met[row][q, chunk.key_start : chunk.key_stop] += 1
        assert chunk.peak_logits == most <= max_logits
        assert chunk.num_runs == len(list(chunk.runs()))
    for row in met:
        assert (row == 1).all()


@pytest.mark.parametrize(
    ("query_lens", "context_keys", "workspace", "max_logits", "expected"),
    [
        pytest.param([1, 1, 4], [3, 4, 10], 8, 16,
                     [([0, 1], (0, 4), [2]), ([2], (0, 8), [2, 2]), ([2], (8, 10), [2, 2])], id="drawn-example"),
        pytest.param([4, 4, 4], [64, 64, 64], 1000, 1024,
                     [([0, 1], (0, 64), [8]), ([2], (0, 64), [4])], id="b79-logits-budget"),
        pytest.param([64], [100], 1000, 1024, [([0], (0, 100), [10] * 6 + [4])], id="b79-query-runs"),
        pytest.param([1, 1, 1], [100] * 3, 256, 1 << 29,
                     [([0, 1], (0, 100), [2]), ([2], (0, 100), [1])], id="b81-workspace-in-states"),
        pytest.param([0, 0, 0, 0], [64] * 4, 1000, 1024, [], id="b85-no-query-tokens"),
        pytest.param([], [], 1000, 1024, [], id="no-rows"),
        pytest.param([5, 0, 7], [0, 9, 0], 4, 4, [([0], (0, 0), [5]), ([2], (0, 0), [7])], id="rows-without-keys"),
        pytest.param([2, 2], [4, 4], 8, 32, [([0, 1], (0, 4), [4])], id="both-budgets-full"),
        pytest.param([2, 2], [4, 4], 7, 32, [([0], (0, 4), [2]), ([1], (0, 4), [2])], id="one-key-over-the-workspace"),
        pytest.param([2, 2], [4, 4], 8, 31, [([0], (0, 4), [2]), ([1], (0, 4), [2])], id="one-logit-over"),
        pytest.param([3], [9], 8, 8, [([0], (0, 8), [1, 1, 1]), ([0], (8, 9), [1, 1, 1])], id="one-key-over-alone"),
    ],
)  # fmt: skip
def test_chunks_by_hand(query_lens, context_keys, workspace, max_logits, expected):
    assert entries(split(query_lens, context_keys, workspace, max_logits)) == expected


def test_b83_row_tile_of_a_long_context():
    (chunk,) = split([8192], [600_000], 1 << 30, 1 << 31)
    assert chunk.run == 3579
    assert chunk.peak_logits == 3579 * 600_000


def test_b125_second_context_chunk_may_have_no_keys_of_a_request():
    chunks = split([1, 1], [4096, 512], 2048, 1 << 20)
    assert entries(chunks) == [([0], (0, 2048), [1]), ([0], (2048, 4096), [1]), ([1], (0, 512), [1])]


def test_a_lone_request_may_keep_its_keys():
    (chunk,) = split([4], [100], 10, 50, unit=None)
    assert (chunk.key_start, chunk.key_stop, chunk.num_keys, chunk.run) == (0, 100, 100, 1)


@pytest.mark.parametrize(
    ("context", "unit"),
    [
        pytest.param(16_000_000, 1024, id="16M"),
        pytest.param(1 << 34, 96, id="2^34-odd-turns"),
    ],
)
def test_far_contexts_are_cut_into_whole_turns(context, unit):
    budget = 1 << 22
    chunks = split([3], [context], budget, budget, unit)
    assert sum(chunk.num_keys for chunk in chunks) == context
    assert chunks[0].key_start == 0
    assert [c.key_stop for c in chunks[:-1]] == [c.key_start for c in chunks[1:]]
    assert {chunk.num_keys for chunk in chunks[:-1]} == {budget // unit * unit}
    assert all(chunk.peak_logits <= budget for chunk in chunks)


def test_products_above_64_bits_are_counted_right():
    (chunk,) = split([1 << 40], [1 << 40], 1 << 50, 1 << 48)
    assert chunk.run == 256
    chunks = split([1 << 35, 1 << 35], [1 << 35, 1 << 35], 1 << 50, 1 << 48)  # joined: 2^72 logits
    assert [chunk.row_start for chunk in chunks] == [0, 1]
    assert [chunk.run for chunk in chunks] == [1 << 13] * 2


@pytest.mark.parametrize(
    ("workspace", "max_logits"),
    [pytest.param(127, 1 << 20, id="workspace"), pytest.param(1 << 20, 127, id="logits"),
     pytest.param(0, 1 << 20, id="no-workspace")],
)  # fmt: skip
def test_budget_below_one_turn_is_refused(workspace, max_logits):
    with pytest.raises(PlanError, match=rf"workspace={workspace} keys and {max_logits} logits .* 128 keys .*raise the"):
        split([1], [1 << 21], workspace, max_logits, unit=128)


def test_widened_chunks_cover_all_rows_of_their_requests():
    # three requests with 2, 1 and 2 rows
    chunks = split([4, 1, 4], [5, 5, 5], 10, 100)
    wide = widen(chunks, np.array([0, 2, 3, 5]))
    assert [(chunk.row_start, chunk.row_stop) for chunk in wide] == [(0, 3), (3, 5)]
    assert [chunk.num_queries for chunk in wide] == [5, 4]
