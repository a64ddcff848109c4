"""Key ranges of both layouts, under key spans too, against a count of the keys complete at each token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError
from cpkit.planner.key_ranges import chunk_tokens, key_ranges_gathered, key_ranges_local, key_rows
from tests import oracles

ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(rows=ROWS, first=st.integers(0, 60), length=st.integers(0, 60), sliced=st.booleans())
def test_chunk_tokens(rows, first, length, sliced):
    seq_lens, query_lens = [max(row) for row in rows], [min(row) for row in rows]
    flat = [(r, p) for r, (s, q) in enumerate(zip(seq_lens, query_lens, strict=True)) for p in range(s - q, s)]
    query_slice = (first, first + length) if sliced else None
    tokens = chunk_tokens(np.array(seq_lens), np.array(query_lens), query_slice)
    expected = flat[first : first + length] if sliced else flat
    assert list(zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)) == expected
    assert flat[tokens.start : tokens.stop] == expected


def test_b93_the_second_request_counts_from_its_own_start():
    """Flat token 13 of two 10-token prefills is token 3 of the second."""
    tokens = chunk_tokens(np.array([10, 10]), np.array([10, 10]), (13, 14))
    assert (tokens.row.tolist(), tokens.position.tolist()) == ([1], [3])


def test_b91_states_are_counted_over_the_whole_context():
    """Ratio 4, 4096 tokens before a chunk of 1945: 1510 states, not the 486 of the chunk alone."""
    tokens = chunk_tokens(np.array([4096 + 1945]), np.array([1945]), (1944, 1945))
    ranges = key_ranges_gathered(tokens.position, tokens.row, np.array([0, 1510]), compress_ratio=4)
    assert ranges.key_end.tolist() == [1510]


@settings(max_examples=60)
@given(
    rows=ROWS,
    ratio=st.sampled_from([1, 2, 4]),
    turn_states=st.integers(1, 3),
    dcp_size=st.integers(1, 4),
    span=st.tuples(st.integers(0, 50), st.integers(0, 20)) | st.none(),
)
def test_local_ranges_count_the_ranks_own_complete_keys(rows, ratio, turn_states, dcp_size, span):
    seq_lens, query_lens = [max(row) for row in rows], [min(row) for row in rows]
    span = None if span is None else (span[0], span[0] + span[1])
    tokens = chunk_tokens(np.array(seq_lens), np.array(query_lens))
    held = [oracles.deal(seq_len // ratio, dcp_size, turn_states) for seq_len in seq_lens]
    for rank in range(dcp_size):
        mine = [[key for key in keys[rank] if span is None or span[0] <= key < span[1]] for keys in held]
        starts = [sum(len(keys) for keys in mine[:row]) for row in range(len(mine) + 1)]
        ranges = key_ranges_local(
            tokens.position,
            tokens.row,
            np.array(starts),
            compress_ratio=ratio,
            dcp_size=dcp_size,
            dcp_rank=rank,
            interleave=ratio * turn_states,
            span=span,
        )
        for row, pos, start, end in zip(tokens.row, tokens.position.tolist(), *ranges, strict=True):
            assert start == starts[row]
            assert end - start == oracles.visible_keys(mine[row], pos, ratio)


@settings(max_examples=40)
@given(
    rows=ROWS,
    ratio=st.sampled_from([1, 3, 4]),
    gap=st.integers(0, 5),
    span=st.tuples(st.integers(0, 50), st.integers(0, 20)) | st.none(),
)
def test_gathered_ranges_count_all_complete_keys(rows, ratio, gap, span):
    seq_lens, query_lens = [max(row) for row in rows], [min(row) for row in rows]
    span = None if span is None else (span[0], span[0] + span[1])
    tokens = chunk_tokens(np.array(seq_lens), np.array(query_lens))
    region_start = np.cumsum([0] + [seq_len // ratio + gap for seq_len in seq_lens])  # regions may be padded
    ranges = key_ranges_gathered(tokens.position, tokens.row, region_start, compress_ratio=ratio, span=span)
    for row, pos, start, end in zip(tokens.row, tokens.position.tolist(), *ranges, strict=True):
        keys = range(seq_lens[row] // ratio) if span is None else range(*span)
        assert start == region_start[row]
        assert end - start == oracles.visible_keys(keys, pos, ratio)


def test_far_contexts_keep_64_bits():
    pos, row = np.array([2**34]), np.array([0])
    start = np.array([2**33, 2**35])
    assert key_ranges_gathered(pos, row, start).key_end.item() == 2**33 + 2**34 + 1
    assert key_ranges_local(pos, row, start, dcp_size=2).key_end.item() == 2**33 + 2**33 + 1


def test_a_state_on_two_ranks_is_refused():
    with pytest.raises(ConfigError, match="interleave=2 is not a multiple of compress_ratio=4"):
        key_ranges_local(np.array([3]), np.array([0]), np.array([0, 1]), compress_ratio=4, dcp_size=2, interleave=2)


@pytest.mark.parametrize(
    ("num_keys", "rows"),
    [
        pytest.param([2, 0, 1], [0, 0, 2], id="row-without-keys"),
        pytest.param([4, 0, 4, 0], [0, 0, 0, 0, 2, 2, 2, 2], id="two-rows-a-request"),
        pytest.param([0], [], id="no-keys"),
    ],
)
def test_key_rows(num_keys, rows):
    assert key_rows(np.array(num_keys)).tolist() == rows
