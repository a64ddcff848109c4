"""The decode/prefill boundary and the runs of rows, against a walk over the rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.planner.order import BatchSplit, request_row_bounds, split_decodes_and_prefills


def walk_boundary(query_lens, is_prefilling, threshold, require_uniform, short_extends_are_decodes):
    """Rows before the first one that is no decode, one row at a time."""
    for row, length in enumerate(query_lens):
        if length > threshold:
            return row
        if require_uniform and length not in (0, query_lens[0]):
            return row
        if not short_extends_are_decodes and is_prefilling[row]:
            return row
    return len(query_lens)


@given(
    rows=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=8),
    threshold=st.integers(0, 5),
    padding=st.integers(0, 3),
    require_uniform=st.booleans(),
    short_extends_are_decodes=st.booleans(),
)
def test_boundary_matches_a_walk(rows, threshold, padding, require_uniform, short_extends_are_decodes):
    query_lens, flags = map(list, zip(*rows, strict=True))
    total = sum(query_lens) + padding
    split = split_decodes_and_prefills(
        np.array(query_lens),
        np.array(flags),
        threshold=threshold,
        num_tokens=total,
        require_uniform=require_uniform,
        treat_short_extends_as_decodes=short_extends_are_decodes,
    )
    first = walk_boundary(query_lens, flags, threshold, require_uniform, short_extends_are_decodes)
    decode_tokens = total if first == len(rows) else sum(query_lens[:first])
    assert split == (first, len(rows) - first, decode_tokens, total - decode_tokens)


@pytest.mark.parametrize(
    ("query_lens", "options", "expected"),
    [
        pytest.param([5, 1], {}, (0, 2, 0, 6), id="row-0-above-threshold"),
        pytest.param([1, 1], {"num_tokens": 4}, (2, 0, 4, 0), id="padding-counts-as-decode"),
        pytest.param([1, 9], {"num_tokens": 12}, (1, 1, 1, 11), id="padding-behind-prefills"),
        pytest.param([2, 0, 1], {"threshold": 2, "require_uniform": True}, (2, 1, 2, 1), id="empty-row-is-uniform"),
        pytest.param([9], {"treat_short_extends_as_decodes": False}, (0, 1, 0, 9), id="long-row-needs-no-flags"),
        pytest.param([], {}, (0, 0, 0, 0), id="empty"),
    ],
)
def test_boundary_by_hand(query_lens, options, expected):
    split = split_decodes_and_prefills(np.array(query_lens, np.int64), **{"threshold": 1, **options})
    assert split == BatchSplit(*expected)


@pytest.mark.parametrize(
    ("query_lens", "flags", "options", "words"),
    [
        pytest.param([1, 3], None, {"treat_short_extends_as_decodes": False}, "2 rows, got none", id="no-flags"),
        pytest.param([1], [True, True], {"treat_short_extends_as_decodes": False}, "1 rows, got 2", id="other-length"),
        pytest.param([], [], {"treat_short_extends_as_decodes": False}, "empty batch", id="empty"),
        pytest.param([2, 2], None, {"num_tokens": 3}, "num_tokens=3 is below the 4", id="negative-padding"),
    ],
)
def test_boundary_refusals(query_lens, flags, options, words):
    flags = None if flags is None else np.array(flags, bool)
    with pytest.raises(PlanError, match=words):
        split_decodes_and_prefills(np.array(query_lens, np.int64), flags, threshold=1, **options)


@given(runs=st.lists(st.integers(1, 4), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_row_bounds_of_shuffled_requests(runs, seed):
    names = np.random.default_rng(seed).permutation(len(runs))
    rows, bounds = [], [0]
    for name, length in zip(names.tolist(), runs, strict=True):
        rows += [name] * length
        bounds.append(len(rows))
    assert request_row_bounds(np.array(rows)).tolist() == bounds


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        pytest.param([], "no rows", id="empty"),
        pytest.param([3, 5, 3], r"request 3 has rows \[0, 2\]", id="not-adjacent"),
    ],
)
def test_row_bounds_refusals(rows, words):
    with pytest.raises(PlanError, match=words):
        request_row_bounds(np.array(rows, np.int64))
