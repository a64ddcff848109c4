"""Names of hashes, and the block size of a trace against all sizes that could explain it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.workload.hash_names import HashBlockSize, HashNames


def test_equal_ids_get_equal_names_within_a_scope_only():
    names = HashNames()
    assert names.names([90, 91, 90]).tolist() == [0, 1, 0]
    assert names.fresh(2).tolist() == [2, 3]
    assert names.names([91, 1 << 70]).tolist() == [1, 4]
    names.new_scope()
    assert names.names([90, 91]).tolist() == [5, 6]


@pytest.mark.parametrize("bad", [None, 3, "12", [1.0], [True], ["a"], [[1]]])
def test_ids_that_are_not_whole_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="hash_ids="):
        HashNames().names(bad)


@pytest.mark.parametrize("count", [math.ceil, math.floor], ids=["to-the-end", "whole-blocks"])
@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 100), lens=st.lists(st.integers(1, 1000), min_size=1, max_size=5), usual=st.integers(1, 100))
def test_chosen_size_explains_every_row(count, size, lens, usual):
    rows = [(n, count(n / size)) for n in lens if count(n / size)]
    found = HashBlockSize()
    for row in rows:
        found.observe(*row)
    # No prompt is above 1,000 tokens, so every power of two that could be chosen is below 2,048.
    sizes = [b for b in range(1, 2049) for rule in (math.ceil, math.floor) if all(rule(n / b) == k for n, k in rows)]
    powers = [b for b in sizes if b & (b - 1) == 0]
    assert found.choose(usual) == (usual if usual in sizes else (powers or sizes)[0])


@pytest.mark.parametrize(
    ("rows", "bad"),
    [([], (5, 9)), ([(1000, 2)], (1000, 3)), ([(1024, 2), (1024, 2)], (1024, 16)), ([], (0, 1))],
    ids=["more-hashes-than-tokens", "another-size", "later-row", "no-tokens"],
)
def test_a_row_that_fits_no_size_is_refused_and_left_out(rows, bad):
    found = HashBlockSize()
    for row in rows:
        found.observe(*row)
    before = found.choose(512)
    with pytest.raises(ValueError, match="no block size fits"):
        found.observe(*bad)
    assert found.choose(512) == before


def test_rows_without_hashes_say_nothing():
    found = HashBlockSize()
    found.observe(10**6, 0)
    assert found.choose(16) == 16


def test_names_are_shared_arrays_nobody_can_write():
    with pytest.raises(ValueError, match="read-only"):
        HashNames().names([1])[:] = np.int32(2)
