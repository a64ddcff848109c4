"""Positions to cache rows and workspace rows, against a search through each rank's keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.planner.remap import compact_rows, gathered_rows, mapped_requests, shard_rows_of
from tests import oracles

LONGEST = 40


@settings(max_examples=50)
@given(
    rows=st.lists(st.lists(st.integers(-2, LONGEST - 1), min_size=3, max_size=3), min_size=1, max_size=4),
    block_size=st.integers(1, 5),
    gap=st.integers(0, 3),
    width=st.integers(0, 6),
    dcp_size=st.integers(1, 4),
    interleave=st.integers(1, 5),
)
def test_shard_rows_are_found_in_the_owners_keys(rows, block_size, gap, width, dcp_size, interleave):
    tables = np.arange(1, 1 + 2 * width, dtype=np.int32).reshape(2, width)
    req = np.arange(len(rows)) % 2
    held = oracles.deal(LONGEST, dcp_size, interleave)
    for rank in range(dcp_size):
        got = shard_rows_of(
            np.array(rows),
            req,
            tables,
            block_size=block_size,
            dcp_size=dcp_size,
            dcp_rank=rank,
            interleave=interleave,
            block_stride=block_size + gap,
        )
        for token, positions in enumerate(rows):
            for column, pos in enumerate(positions):
                expected = -1
                if pos in held[rank] and (local := held[rank].index(pos)) < width * block_size:
                    block = int(tables[req[token], local // block_size])
                    expected = block * (block_size + gap) + local % block_size
                assert got[token, column] == expected


@settings(max_examples=50)
@given(
    positions=st.lists(st.integers(-2, LONGEST - 1), min_size=1, max_size=6),
    start=st.integers(0, 5),
    rank_stride=st.integers(1, 20),
    dcp_size=st.integers(1, 4),
    interleave=st.integers(1, 5),
)
def test_gathered_rows_address_the_rank_major_workspace(positions, start, rank_stride, dcp_size, interleave):
    workspace = {}
    for rank, keys in enumerate(oracles.deal(LONGEST, dcp_size, interleave)):
        for row, pos in enumerate(keys[: max(rank_stride - start, 0)]):
            workspace[pos] = rank * rank_stride + start + row
    got = gathered_rows(
        np.array([positions]),
        np.array([start]),
        rank_stride=rank_stride,
        dcp_size=dcp_size,
        interleave=interleave,
    )
    assert got.tolist() == [[workspace.get(pos, -1) for pos in positions]]


def test_far_positions_keep_64_bits():
    far = np.array([[2**34]])
    assert gathered_rows(far, np.array([5]), rank_stride=2**34, dcp_size=2, interleave=1).item() == 2**33 + 5
    block = np.array([[0] * 16 + [2**31 - 1]], np.int32)
    row = shard_rows_of(
        far // 2**24, np.array([0]), block, block_size=64, dcp_size=1, dcp_rank=0, interleave=1, block_stride=1_077_120
    )
    assert row.item() == (2**31 - 1) * 1_077_120


@pytest.mark.parametrize(
    ("page", "stride"),
    [
        pytest.param(3, 19_008, id="b117-stride-above-the-payload"),
        pytest.param(1994, 1_077_120, id="b127-just-above-2^31"),
        pytest.param(2066, 1_039_680, id="b127-another-stride-above-2^31"),
        pytest.param(598, 3_600_000, id="b129-big-blocks"),
    ],
)
def test_pages_lie_a_stride_apart(page, stride):
    row = shard_rows_of(
        np.array([[5]]),
        np.array([0]),
        np.array([[page]], np.int32),
        block_size=64,
        dcp_size=1,
        dcp_rank=0,
        interleave=1,
        block_stride=stride,
    )
    assert row.item() == page * stride + 5


@given(rows=st.lists(st.lists(st.integers(-1, 3), min_size=4, max_size=4), max_size=5))
def test_compaction_keeps_the_order(rows):
    compact, counts = compact_rows(np.array(rows, np.int64).reshape(-1, 4))
    for before, after, count in zip(rows, compact.tolist(), counts.tolist(), strict=True):
        kept = [row for row in before if row != -1]
        assert count == len(kept)
        assert after == kept + [-1] * (4 - len(kept))


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [pytest.param(None, [0, 2, 1], id="rows-are-requests"), pytest.param([4, -1, 6], [4, 6, 0], id="negative-is-0")],
)
def test_request_mapping(mapping, expected):
    mapping = None if mapping is None else np.array(mapping)
    assert mapped_requests(np.array([0, 2, 1]), mapping).tolist() == expected


@pytest.mark.parametrize("req", [-1, 3])
def test_request_outside_the_mapping_is_refused(req):
    with pytest.raises(PlanError, match=f"request index {req} with an idx_mapping of 3"):
        mapped_requests(np.array([0, req]), np.array([4, 5, 6]))
