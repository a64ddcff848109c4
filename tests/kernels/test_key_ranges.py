"""Key ranges of prefill chunks against keys looked at one by one, in both layouts, with and without a span."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.key_ranges import key_ranges_gathered, key_ranges_local, key_rows
from tests import oracles

ROWS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=4)


def i32(values):
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def ranges(kernel, rows, starts, token_start, num_tokens, **options):
    """Ranges of tokens of rows (tokens before, queries, stride), written over garbage."""
    loc = i32(np.cumsum([3, *(new for _, new, _ in rows)]))
    lens = i32([before + (1 + (new - 1) * stride if new else 0) for before, new, stride in rows])
    out = {name: torch.full((num_tokens,), -99, dtype=torch.int32) for name in ("key_start", "key_end")}
    stride = i32([stride for *_, stride in rows])
    kernel(loc, lens, torch.tensor(starts), token_start=token_start, row_stride=stride, **options, **out)
    return list(zip(out["key_start"].tolist(), out["key_end"].tolist(), strict=True))


@settings(max_examples=60)
@given(
    rows=ROWS,
    dcp_size=st.integers(1, 3),
    turn=st.integers(1, 2),
    ratio=st.sampled_from([1, 2, 4]),
    span=st.none() | st.tuples(st.integers(0, 4), st.integers(1, 9)),
    skipped=st.integers(0, 3),
)
def test_ranges_hold_the_visible_keys(rows, dcp_size, turn, ratio, span, skipped):
    span = None if span is None else (span[0], span[0] + span[1])
    first, stop = span or (0, 99)
    tokens = [(row, before + at * stride) for row, (before, new, stride) in enumerate(rows) for at in range(new)]
    tokens = tokens[skipped:]
    options = {"compress_ratio": ratio, "span": span}
    starts = [100 * row for row in range(len(rows))]

    def count(held, pos):
        return sum(first <= state < stop and (state + 1) * ratio <= pos + 1 for state in held)

    found = ranges(key_ranges_gathered, rows, starts, 3 + skipped, len(tokens), **options)
    assert found == [(100 * row, 100 * row + count(range(40), pos)) for row, pos in tokens]
    for rank in range(dcp_size):
        held = oracles.deal(40, dcp_size, turn)[rank]
        shard = {"dcp_size": dcp_size, "dcp_rank": rank, "interleave": turn * ratio}
        found = ranges(key_ranges_local, rows, starts, 3 + skipped, len(tokens), **shard, **options)
        assert found == [(100 * row, 100 * row + count(held, pos)) for row, pos in tokens]


def test_tokens_behind_the_last_row_see_nothing():
    found = ranges(key_ranges_gathered, [(4, 2, 1), (0, 1, 1)], [0, 8], 3, 5, compress_ratio=1)
    assert found == [(0, 5), (0, 6), (8, 9), (8, 8), (8, 8)]


@pytest.mark.parametrize("counts", [[2, 0, 1], [0, 0, 3], [4], [1, 0, 0]], ids=str)
def test_key_rows(counts):
    out = torch.full((sum(counts),), -99, dtype=torch.int32)
    key_rows(i32([0, *itertools.accumulate(counts)]), out=out)
    assert out.tolist() == [row for row, count in enumerate(counts) for _ in range(count)]


def test_region_starts_beyond_int32_would_wrap_so_they_come_as_int64():
    with pytest.raises(PlanError, match="region_start is int32"):
        key_ranges_gathered(
            i32([0, 1]), i32([1]), i32([0]), token_start=0, compress_ratio=1, key_start=i32([0]), key_end=i32([0])
        )


def test_a_state_on_two_ranks_is_refused():
    with pytest.raises(ConfigError, match="interleave=2 is not a multiple of compress_ratio=4"):
        ranges(key_ranges_local, [(0, 1, 1)], [0], 3, 1, compress_ratio=4, dcp_size=2, interleave=2)
