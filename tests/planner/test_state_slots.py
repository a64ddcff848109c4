"""Slots of compressed states, plain, under DCP and packed for the PCP all-gather, against states appended in turn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.planner.slots import token_positions
from cpkit.planner.state_slots import (
    StatePlaces,
    cache_block_tables,
    kernel_block_tables,
    packed_state_slots,
    sharded_state_slots,
    state_places,
    unpack_state_slots,
)
from tests import oracles


@st.composite
def batches(draw):
    rows = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), max_size=3))
    seq_lens, query_lens = [max(row) for row in rows], [min(row) for row in rows]
    written = draw(st.lists(st.booleans(), min_size=sum(query_lens), max_size=sum(query_lens)))
    return seq_lens, query_lens, written


@settings(max_examples=60)
@given(
    batch=batches(),
    ratio=st.sampled_from([1, 2, 4, 7]),
    turn_states=st.integers(1, 3),
    states_per_block=st.integers(1, 5),
    dcp_size=st.integers(1, 4),
)
def test_states_are_appended_in_turn(batch, ratio, turn_states, states_per_block, dcp_size):
    seq_lens, query_lens, written = batch
    tables = np.arange(1, 1 + len(seq_lens) * 70, dtype=np.int32).reshape(len(seq_lens), 70)
    interleave = ratio * turn_states
    req, pos = token_positions(np.array(seq_lens, np.int64), np.array(query_lens, np.int64))
    places = state_places(
        pos,
        req,
        tables,
        compress_ratio=ratio,
        states_per_block=states_per_block,
        dcp_size=dcp_size,
        interleave=interleave,
        written=np.array(written, bool),
    )
    truth = oracles.state_slots(
        seq_lens,
        query_lens,
        tables.tolist(),
        ratio=ratio,
        states_per_block=states_per_block,
        ranks=dcp_size,
        interleave=interleave,
        written=written,
    )
    packed = packed_state_slots(places, num_tokens=len(pos), dcp_size=dcp_size)
    for rank in range(dcp_size):
        assert sharded_state_slots(places, num_tokens=len(pos), dcp_rank=rank).tolist() == truth[rank]
        assert unpack_state_slots(packed, dcp_size=dcp_size, dcp_rank=rank).tolist() == truth[rank]


def test_reading_states_of_unwritten_tokens_is_not_needed():
    """A replayed token may lie in a block that is gone: only states to write need one."""
    options = {"compress_ratio": 2, "states_per_block": 1}
    req, pos = np.zeros(4, np.int64), np.arange(4)
    tables = np.array([[0, 5]], np.int32)
    places = state_places(pos, req, tables, written=np.array([False, False, True, True]), **options)
    assert sharded_state_slots(places, num_tokens=6, dcp_rank=0).tolist() == [-1, -1, -1, 5, -1, -1]
    with pytest.raises(PlanError, match=r"request 0: position 1 lies in entry 0 .* null block"):
        state_places(pos, req, tables, **options)


@pytest.mark.parametrize(("num_tokens", "num_states"), [(3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_states_count(num_tokens, num_states):
    pos = np.arange(num_tokens)
    places = state_places(pos, pos * 0, np.array([[1, 2]], np.int32), compress_ratio=4, states_per_block=1)
    assert len(places.slot) == num_states


def test_interleave_that_cuts_a_state_is_refused():
    with pytest.raises(ConfigError, match="interleave=6 is not a multiple of compress_ratio=4"):
        state_places(
            np.arange(4),
            np.zeros(4, np.int64),
            np.array([[1]], np.int32),
            compress_ratio=4,
            states_per_block=4,
            dcp_size=2,
            interleave=6,
        )


def test_packing_beyond_64_bits_is_refused():
    places = StatePlaces(np.array([0]), np.array([1]), np.array([2**62]))
    with pytest.raises(PlanError, match=f"slot {2**62} packed with dcp_size=2 exceeds 64 bits"):
        packed_state_slots(places, num_tokens=1, dcp_size=2)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_kernel_blocks_make_cache_blocks(factor):
    cache = np.array([[3, 1, 0], [2, 5, 9]], np.int32)
    kernel = kernel_block_tables(cache, factor)
    assert kernel.tolist() == [[b * factor + i for b in row for i in range(factor)] for row in cache.tolist()]
    assert cache_block_tables(kernel, factor).tolist() == cache.tolist()


def test_kernel_blocks_that_do_not_line_up_are_refused():
    with pytest.raises(PlanError, match="request 1: kernel block 7 in column 2 does not start"):
        cache_block_tables(np.array([[2, 3, 4, 5], [6, 7, 7, 8]], np.int32), 2)


def test_kernel_block_ids_stay_in_32_bits():
    with pytest.raises(PlanError, match=f"kernel block id reaches {2**31 + 1}"):
        kernel_block_tables(np.array([[2**30]], np.int32), 2)
