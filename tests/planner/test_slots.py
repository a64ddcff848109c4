"""Token and tail slots against tokens dealt out one by one; what may not be written is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.planner.slots import (
    PAD,
    as_int32,
    padded_slots,
    replicated_slots,
    sharded_slots,
    tail_slots,
    token_positions,
    written,
)
from tests import oracles


def make_tables(seq_lens, block_size, seed):
    """Distinct non-null blocks, as many columns as the longest request needs on one rank."""
    width = max(-(-max(seq_lens, default=0) // block_size), 1)
    ids = np.random.default_rng(seed).permutation(len(seq_lens) * width) + 1
    return ids.reshape(len(seq_lens), width).astype(np.int32)


@st.composite
def batches(draw):
    rows = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4))
    return [max(row) for row in rows], [min(row) for row in rows]


@settings(max_examples=60)
@given(
    lens=batches(),
    block_size=st.integers(1, 9),
    dcp_size=st.integers(1, 5),
    interleave=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_sharded_slots_follow_the_deal(lens, block_size, dcp_size, interleave, seed):
    seq_lens, query_lens = lens
    tables = make_tables(seq_lens, block_size, seed)
    req, pos = token_positions(np.array(seq_lens, np.int64), np.array(query_lens, np.int64))
    truth = oracles.token_slots(seq_lens, query_lens, tables.tolist(), block_size, dcp_size, interleave)
    options = {"block_size": block_size, "dcp_size": dcp_size, "interleave": interleave}
    slots = np.array([sharded_slots(pos, req, tables, dcp_rank=rank, **options) for rank in range(dcp_size)])
    assert slots.tolist() == truth
    assert (written(slots).sum(axis=0) == 1).all()  # every token stored once
    for row in slots:
        assert len(set(row[written(row)].tolist())) == written(row).sum()  # no two tokens in one slot


@pytest.mark.parametrize(
    ("position", "interleave", "block_size", "owner", "local"),
    [
        pytest.param(1500, 1024, 128, 1, 476, id="b45-interleave-above-the-kernel-block"),
        pytest.param(1536, 1, 1, 0, 192, id="b53-interleave-1"),
        pytest.param(1536, 1536, 1, 1, 0, id="b53-interleave-1536"),
    ],
)
def test_owner_and_local_index(position, interleave, block_size, owner, local):
    dcp_size = 8 if position == 1536 else 2
    tables = np.arange(1, 2001, dtype=np.int32)[None]
    slots = [
        sharded_slots(
            np.array([position]),
            np.array([0]),
            tables,
            block_size=block_size,
            dcp_size=dcp_size,
            dcp_rank=rank,
            interleave=interleave,
        ).item()
        for rank in range(dcp_size)
    ]
    expected = [PAD] * dcp_size
    expected[owner] = block_size + local  # block ids 1, 2, ... follow each other
    assert slots == expected


def test_replicated_cache_ignores_the_dcp_world():
    slots = replicated_slots(np.array([6]), np.array([0]), np.array([[3, 5]], np.int32), block_size=4)
    assert slots.tolist() == [5 * 4 + 2]


@pytest.mark.parametrize(
    ("positions", "tables", "skip_null_blocks", "expected"),
    [
        pytest.param([3, 4, 5, 6, 7, 8], [[5]], True, [23, 20, 21, 22, 23, 20], id="circular"),
        pytest.param([0, 9], [[0, 7]], True, [PAD, PAD], id="null-block"),
        pytest.param([0, 9], [[0, 7]], False, [0, 1], id="null-block-counts"),
        pytest.param([], [[5]], True, [], id="no-tokens"),
    ],
)
def test_tail_slots(positions, tables, skip_null_blocks, expected):
    req = np.zeros(len(positions), np.int64)
    tables = np.array(tables, np.int32)
    slots = tail_slots(np.array(positions, np.int64), req, tables, kpool=4, skip_null_blocks=skip_null_blocks)
    assert slots.tolist() == expected


def test_b129_slots_far_out_keep_64_bits():
    tables = np.full((1, 20_000), 2**31 - 1, np.int32)
    position = np.array([16_000_000])
    slots = replicated_slots(position, np.array([0]), tables, block_size=1024)
    assert slots.item() == (2**31 - 1) * 1024 + 16_000_000 % 1024
    assert tail_slots(position, np.array([0]), tables, kpool=4096).item() == (2**31 - 1) * 4096 + 16_000_000 % 4096
    with pytest.raises(PlanError, match=r"slot reaches \d+, outside int32"):
        as_int32("slot", slots)
    assert as_int32("slot", np.array([-1, 2**31 - 1])).tolist() == [-1, 2**31 - 1]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        pytest.param([[3]], "request 0: position 8 needs entry 1 of a block table that is 1 wide", id="too-narrow"),
        pytest.param([[3, 0]], r"request 0: position 8 lies in entry 1 .*width 2.* null block", id="null-block"),
        pytest.param([[]], "0 wide", id="no-blocks"),
    ],
)
@pytest.mark.parametrize("dcp_rank", [0, 1])
def test_every_rank_refuses_unwritable_positions(tables, words, dcp_rank):
    tables = np.array(tables, np.int32).reshape(1, -1)
    options = {"block_size": 4, "dcp_size": 2, "interleave": 4, "dcp_rank": dcp_rank}
    with pytest.raises(PlanError, match=words):
        sharded_slots(np.array([8]), np.array([0]), tables, **options)


def test_negative_positions_are_refused():
    with pytest.raises(PlanError, match="request 1: seq_len=2 < query_len=3"):
        token_positions(np.array([4, 2]), np.array([4, 3]))


def test_tail_needs_a_column():
    with pytest.raises(PlanError, match="column 0"):
        tail_slots(np.array([0]), np.array([0]), np.zeros((1, 0), np.int32), kpool=4)


@pytest.mark.parametrize("length", [2, 5])
def test_padding_names_no_row(length):
    assert padded_slots(np.array([7, 9]), length).tolist() == [7, 9] + [PAD] * (length - 2)


def test_padding_never_drops_tokens():
    with pytest.raises(PlanError, match="buffer of 1 slots for 2 tokens"):
        padded_slots(np.array([7, 9]), 1)


def test_b47_slots_of_another_width_are_refused():
    with pytest.raises(PlanError, match="2147483648"):
        as_int32("slot", np.array([7, 1 << 31]))
