"""Decode lengths, flattened and native, global and on each rank, against contexts grown token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.planner.decode import expand_block_tables, flatten_decodes, local_decode_lens, native_decodes
from tests import oracles

ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=5)


@settings(max_examples=60)
@given(rows=ROWS, padding=st.integers(0, 3) | st.none())
def test_flattened(rows, padding):
    seq_lens, query_lens = [s for s, _ in rows], [q for _, q in rows]
    num_rows = None if padding is None else sum(query_lens) + padding
    flat = flatten_decodes(np.array(seq_lens, np.int64), np.array(query_lens, np.int64), num_rows=num_rows)
    lens = oracles.decode_lens(seq_lens, query_lens)
    assert flat.seq_lens.tolist() == [n for row in lens for n in row] + [0] * (padding or 0)
    owners = [req for req, row in enumerate(lens) for _ in row]
    assert flat.req.tolist() == owners + [len(rows) + i for i in range(padding or 0)]

    tables = np.arange(1, 1 + 3 * len(rows), dtype=np.int32).reshape(-1, 3)
    expanded = expand_block_tables(tables, flat.req)
    assert expanded.dtype == np.int32
    assert expanded.tolist() == [tables[req].tolist() for req in owners] + [[0, 0, 0]] * (padding or 0)


@settings(max_examples=60)
@given(rows=ROWS, extra=st.integers(0, 2) | st.none())
def test_native_rows_are_packed_from_the_left(rows, extra):
    seq_lens, query_lens = [s for s, _ in rows], [q for _, q in rows]
    longest = max(query_lens, default=0)
    width = None if extra is None else longest + extra
    native = native_decodes(np.array(seq_lens, np.int64), np.array(query_lens, np.int64), width=width)
    columns = longest + (extra or 0)
    lens = oracles.decode_lens(seq_lens, query_lens)
    assert native.shape == (len(rows), columns)
    assert native.tolist() == [row + [0] * (columns - len(row)) for row in lens]


@settings(max_examples=60)
@given(
    rows=ROWS,
    dcp_size=st.integers(1, 4),
    turn_states=st.integers(1, 3),
    ratio=st.sampled_from([1, 2, 4]),
)
def test_local_lens_count_the_ranks_complete_keys(rows, dcp_size, turn_states, ratio):
    seq_lens, query_lens = [s for s, _ in rows], [q for _, q in rows]
    lens = flatten_decodes(np.array(seq_lens, np.int64), np.array(query_lens, np.int64)).seq_lens
    for rank in range(dcp_size):
        local = local_decode_lens(
            lens, dcp_size=dcp_size, dcp_rank=rank, interleave=ratio * turn_states, compress_ratio=ratio
        )
        held = oracles.deal(20 // ratio, dcp_size, turn_states)[rank]
        assert local.tolist() == [oracles.visible_keys(held, n - 1, ratio) for n in lens.tolist()]


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "expected"),
    [
        pytest.param([0], [2], [0, 0], id="b69-padded-request"),
        pytest.param([2], [4], [0, 0, 1, 2], id="b69-shorter-than-its-query"),
        pytest.param([10, 7, 12, 0], [3, 1, 4, 0], [8, 9, 10, 7, 9, 10, 11, 12], id="b77-ragged"),
    ],
)
def test_lens_never_fall_below_zero(seq_lens, query_lens, expected):
    seq_lens, query_lens = np.array(seq_lens), np.array(query_lens)
    assert flatten_decodes(seq_lens, query_lens).seq_lens.tolist() == expected
    native = native_decodes(seq_lens, query_lens)
    assert [n for row, q in zip(native.tolist(), query_lens, strict=True) for n in row[:q]] == expected


def test_b67_localising_comes_after_the_expansion():
    lens = flatten_decodes(np.array([10]), np.array([3])).seq_lens
    assert local_decode_lens(lens, dcp_size=2, dcp_rank=1, interleave=1).tolist() == [4, 4, 5]


def test_too_few_rows_are_refused():
    with pytest.raises(PlanError, match="3 rows for 4 decode tokens"):
        flatten_decodes(np.array([9]), np.array([4]), num_rows=3)
    with pytest.raises(PlanError, match="a decode of 4 query tokens in rows of 3"):
        native_decodes(np.array([9]), np.array([4]), width=3)


def test_a_state_on_two_ranks_is_refused():
    with pytest.raises(ConfigError, match="interleave=2 is not a multiple of compress_ratio=4"):
        local_decode_lens(np.array([8]), dcp_size=2, dcp_rank=0, interleave=2, compress_ratio=4)
