"""The gather of a chunk against keys laid out card by card."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.planner.chunks import Chunk
from cpkit.planner.gather import GatherPlan, plan_gather
from tests.oracles import deal
from tests.planner_oracles import gathered_places


def chunk_of(row_start, row_stop, key_start=0, key_stop=1 << 40):
    return Chunk(row_start, row_stop, key_start, key_stop, num_keys=1, num_queries=1, run=1)


def gather_of(num_keys, dcp_size, interleave, rows_a_req=1, **span):
    """The gather of one chunk of requests with these keys, each with as many rows."""
    shard_keys = [max(map(len, deal(n, dcp_size, interleave))) for n in num_keys]
    row_req = np.repeat(np.arange(len(num_keys)), rows_a_req)
    row_keys = np.repeat(np.array(shard_keys, np.int64), rows_a_req)
    chunk = chunk_of(0, len(row_req), **span)
    return plan_gather(chunk, row_req, row_keys, dcp_size=dcp_size, interleave=interleave)


def check_places(gather, num_keys, dcp_size, interleave, first=0, stop=1 << 40):
    places, total = gathered_places(num_keys, first, stop, dcp_size, interleave)
    idx, start = gather.deinterleave_idx(), gather.region_start()
    assert len(idx) == gather.num_keys == total
    assert gather.keys_per_rank * dcp_size == total
    assert ((idx >= 0) & (idx < total)).all()
    for req, of_req in enumerate(places):
        region = idx[start[req] : start[req + 1]].tolist()
        assert region[: len(of_req)] == [of_req[key] for key in sorted(of_req)]
        # padding stays inside the request's own region on some rank
        local = gather.local_start()[req : req + 2].tolist()
        assert all(local[0] <= place % gather.keys_per_rank < local[1] for place in region)


@settings(max_examples=50)
@given(
    num_keys=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 5000)), min_size=1, max_size=4),
    dcp_size=st.integers(1, 16),
    interleave=st.integers(1, 128),
    rows_a_req=st.integers(1, 3),
)
def test_keys_come_back_in_token_order(num_keys, dcp_size, interleave, rows_a_req):
    gather = gather_of(num_keys, dcp_size, interleave, rows_a_req)
    check_places(gather, num_keys, dcp_size, interleave)
    assert gather.row_region.tolist() == [req for req in range(len(num_keys)) for _ in range(rows_a_req)]


@settings(max_examples=30)
@given(
    num_keys=st.integers(1, 400), dcp_size=st.integers(2, 16), interleave=st.integers(1, 16), turns=st.integers(1, 5)
)
def test_each_key_span_is_gathered_once(num_keys, dcp_size, interleave, turns):
    padded = max(map(len, deal(num_keys, dcp_size, interleave))) * dcp_size
    span = turns * dcp_size * interleave
    for start in range(0, padded, span):
        stop = min(start + span, padded)
        gather = gather_of([num_keys], dcp_size, interleave, key_start=start, key_stop=stop)
        assert gather.first_local == start // dcp_size
        assert gather.num_keys == stop - start
        check_places(gather, [num_keys], dcp_size, interleave, start, stop)


def test_drawn_example():
    gather = gather_of([3, 1], 2, 1)
    assert gather.deinterleave_idx().tolist() == [0, 3, 1, 4, 2, 5]
    assert gather.region_start().tolist() == [0, 4, 6]
    assert gather.local_start().tolist() == [0, 2, 3]
    assert (gather.keys_per_rank, gather.num_keys) == (3, 6)


def test_only_the_chunks_own_rows_count():
    row_req, row_keys = np.array([4, 4, 7, 9, 9]), np.array([2, 2, 5, 3, 3])
    gather = plan_gather(chunk_of(2, 5), row_req, row_keys, dcp_size=2, interleave=1)
    assert gather.shard_keys.tolist() == [5, 3]
    assert gather.row_region.tolist() == [0, 1, 1]


def test_b35_contributions_have_one_size_where_a_shard_is_empty():
    gather = gather_of([1], 4, 8)
    assert (gather.keys_per_rank, gather.num_keys) == (1, 4)
    assert gather.deinterleave_idx().tolist() == [0, 0, 0, 0]


def test_far_context_is_planned_without_its_tokens():
    gather = plan_gather(
        chunk_of(0, 2), np.array([0, 1]), np.array([(1 << 31) + 5, 2_000_000]), dcp_size=8, interleave=64
    )
    assert gather.keys_per_rank == (1 << 31) + 2_000_005
    assert gather.num_keys == (1 << 34) + 16_000_040
    assert gather.region_start().tolist() == [0, (1 << 34) + 40, (1 << 34) + 16_000_040]


def test_far_span_keeps_64_bits():
    gather = GatherPlan(2, 1, 1 << 32, np.array([2]), np.array([0]))
    assert gather.deinterleave_idx().tolist() == [0, 2, 1, 3]


def test_rows_of_one_request_must_agree():
    with pytest.raises(PlanError, match=r"row 3 of request 9: largest shard 4 keys, .*belongs to the whole request"):
        plan_gather(chunk_of(1, 4), np.array([4, 7, 9, 9]), np.array([1, 5, 3, 4]), dcp_size=2, interleave=1)
