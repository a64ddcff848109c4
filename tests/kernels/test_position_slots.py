"""Positions to rows of a shard and of a workspace, and their compaction, against positions dealt out one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.backends import BACKENDS
from cpkit.kernels.position_slots import (
    COLUMNS,
    KeyBlocks,
    compact_shard_slots,
    compact_slots,
    gathered_slots,
    shard_slots,
)
from cpkit.topology import Shard
from tests import oracles
from tests.kernels.tensors import i32

backends = pytest.mark.parametrize("backend", BACKENDS)
WORLDS = [pytest.param(1, 1, id="no-dcp"), pytest.param(4, 8, id="block"), pytest.param(3, 5, id="odd")]
ALONE = Shard()


@backends
@settings(max_examples=20)
@given(
    positions=st.lists(st.lists(st.integers(-1, 40), min_size=3, max_size=3), min_size=1, max_size=4),
    dcp_size=st.integers(1, 3),
    interleave=st.integers(1, 3),
    mapped=st.booleans(),
)
def test_positions_become_rows_of_their_owner(backend, positions, dcp_size, interleave, mapped):
    tables = 1 + np.arange(8).reshape(2, 4)
    req = [at % 2 for at in range(len(positions))]
    mapping = i32([1, -3]) if mapped else None
    given = torch.tensor(positions, dtype=torch.int32)
    for rank in range(dcp_size):
        held = oracles.deal(41, dcp_size, interleave)[rank]
        out = torch.full(given.shape, -99)
        blocks = KeyBlocks(i32(tables), block_size=2, block_stride=5, idx_mapping=mapping)
        shard = Shard(dcp_size=dcp_size, dcp_rank=rank, interleave=interleave)
        shard_slots(given, i32(req), blocks, shard, out=out, backend=backend)
        want = []
        for row, wanted in zip(req, positions, strict=True):
            table = tables[[1, 0][row]] if mapped else tables[row]
            local = [held.index(pos) if pos in held else 99 for pos in wanted]
            want.append([table[at // 2] * 5 + at % 2 if at < 8 else -1 for at in local])
        assert out.tolist() == want
        counts = i32([-99] * len(positions))
        compact_slots(out, out=out, counts=counts, backend=backend)
        kept = [[slot for slot in row if slot >= 0] for row in want]
        assert out.tolist() == [row + [-1] * (3 - len(row)) for row in kept]
        assert counts.tolist() == list(map(len, kept))
        at_once, counted = torch.full(given.shape, -99, dtype=torch.int32), i32([-99] * len(positions))
        compact_shard_slots(given, i32(req), blocks, shard, out=at_once, counts=counted, backend=backend)
        assert at_once.tolist() == out.tolist() and counted.tolist() == counts.tolist()


@backends
def test_rows_beyond_int32(backend):
    out = torch.zeros(1, 1, dtype=torch.int64)
    for block, stride, row in [(1994, 1_077_120, 2_147_777_280), (598, 3_600_000, 2_152_800_000)]:
        shard_slots(i32([[0]]), i32([0]), KeyBlocks(i32([[block]]), 1, stride), ALONE, out=out, backend=backend)
        assert out.item() == row


@backends
def test_a_cache_without_blocks_has_no_rows(backend):
    out = torch.zeros(1, 2, dtype=torch.int64)
    blocks = KeyBlocks(i32(np.zeros((1, 0))), block_size=1, block_stride=1)
    shard_slots(i32([[0, -1]]), i32([0]), blocks, ALONE, out=out, backend=backend)
    assert out.tolist() == [[-1, -1]]


@backends
@pytest.mark.parametrize(("dcp_size", "interleave"), WORLDS)
def test_gathered_positions_keep_every_owner(backend, dcp_size, interleave):
    positions = [[0, 1, 7], [13, -1, 40]]
    starts, stride = [2, 5], 12
    workspace = {}
    for token, start in enumerate(starts):
        for rank, held in enumerate(oracles.deal(41, dcp_size, interleave)):
            for at, pos in enumerate(held):
                if start + at < stride:
                    workspace[token, pos] = rank * stride + start + at
    out = torch.full((2, 3), -99)
    shard = Shard(dcp_size=dcp_size, interleave=interleave)
    gathered_slots(torch.tensor(positions), i32(starts), shard, rank_stride=stride, out=out, backend=backend)
    assert out.tolist() == [[workspace.get((token, pos), -1) for pos in row] for token, row in enumerate(positions)]


@backends
@pytest.mark.parametrize(
    ("change", "slots"),
    [
        pytest.param({"req": [-1, 0]}, [[-1, -1], [6, 7]], id="request-below-0"),
        pytest.param({"req": [2, 1]}, [[-1, -1], [10, 11]], id="request-behind-the-last"),
        pytest.param({"idx_mapping": i32([1, 9])}, [[10, 11], [-1, -1]], id="mapped-behind-the-tables"),
        pytest.param({"req": [5, 0], "idx_mapping": i32([1])}, [[-1, -1], [10, 11]], id="behind-the-mapping"),
        pytest.param({"idx_mapping": i32([])}, [[-1, -1]] * 2, id="empty-mapping"),
        pytest.param({"tables": [[-1, 7], [5, 6]]}, [[-1, -1], [10, 11]], id="block-below-0"),
        pytest.param({"tables": [[2**31 - 1, 7], [5, 6]]}, [[2**32 - 2, 2**32 - 1], [10, 11]], id="far-block"),
    ],
)
def test_hostile_requests_and_blocks(change, slots, backend):
    """Positions 0 1 of two tokens, whose requests have the tables 3 4 and 5 6, in a corner of a wider table."""
    change = {"req": [0, 1], "tables": [[3, 4], [5, 6]], **change}
    wide = torch.full((2, 4), 99, dtype=torch.int32)
    wide[:, :2] = i32(change.pop("tables"))
    out, counts = torch.full((2, 2), -99), i32([-99, -99])
    args = (i32([[0, 1]] * 2), i32(change.pop("req")), KeyBlocks(wide[:, :2], 2, 2, **change), ALONE)
    shard_slots(*args, out=out, backend=backend)
    assert out.tolist() == slots
    compact_shard_slots(*args, out=out, counts=counts, backend=backend)
    assert out.tolist() == slots
    assert counts.tolist() == [2 - row.count(-1) for row in slots]


@backends
def test_positions_beyond_int32(backend):
    far = 3 * 2**31 + 1
    out = torch.zeros(1, 1, dtype=torch.int64)
    blocks, shard = KeyBlocks(i32([[9, 8, 7, 5]]), 2**30, 2**30), Shard(dcp_size=2, dcp_rank=1)
    shard_slots(torch.tensor([[far]]), i32([0]), blocks, shard, out=out, backend=backend)
    assert out.item() == 5 * 2**30 + far // 2 % 2**30
    gathered_slots(torch.tensor([[far]]), i32([3]), shard, rank_stride=2**33, out=out, backend=backend)
    assert out.item() == 2**33 + 3 + far // 2


@backends
@pytest.mark.parametrize("k", [0, 1, COLUMNS - 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS + 5])
def test_compaction_keeps_the_order(k, backend):
    """Rows with no slot, with every third, with all, written where they are read, in a corner of a wider buffer."""
    wide = torch.full((4, k + 2), -99)
    rows = [[-1] * k, [at if at % 3 == 0 else -1 for at in range(k)], list(range(k))]
    wide[:3, :k] = torch.tensor(rows).view(3, k)
    counts = i32([-99] * 3)
    compact_slots(wide[:3, :k], out=wide[:3, :k], counts=counts, backend=backend)
    kept = [[slot for slot in row if slot >= 0] for row in rows]
    assert wide[:3, :k].tolist() == [row + [-1] * (k - len(row)) for row in kept]
    assert counts.tolist() == list(map(len, kept))
    assert (wide[:, k:] == -99).all() and (wide[3] == -99).all()


@backends
@pytest.mark.parametrize("k", [COLUMNS - 1, COLUMNS, COLUMNS + 1])
def test_blocks_of_positions(k, backend):
    positions = torch.arange(k, dtype=torch.int32)[None]
    out = torch.full((1, k), -99)
    shard = Shard(dcp_size=2, dcp_rank=1, interleave=2)
    gathered_slots(positions, i32([1]), shard, rank_stride=k, out=out, backend=backend)
    hands = oracles.deal(k, 2, 2)
    place = {pos: rank * k + 1 + at for rank, hand in enumerate(hands) for at, pos in enumerate(hand)}
    assert out[0].tolist() == [place[pos] for pos in range(k)]
    blocks = KeyBlocks(i32(np.arange(k))[None], block_size=2, block_stride=2)
    shard_slots(positions, i32([0]), blocks, shard, out=positions, backend=backend)  # out may be positions
    held = {pos: at for at, pos in enumerate(hands[1])}
    assert positions[0].tolist() == [held.get(pos, -1) for pos in range(k)]


def test_refusals():
    with pytest.raises(ConfigError, match="shard_slots with backend='cuda'"):
        shard_slots(i32([[0]]), i32([0]), KeyBlocks(i32([[0]]), 1, 1), ALONE, out=i32([[0]]), backend="cuda")
    with pytest.raises(PlanError, match="block_stride=0"):
        shard_slots(i32([[0]]), i32([0]), KeyBlocks(i32([[0]]), 1, 0), ALONE, out=i32([[0]]))
    long = KeyBlocks(i32([[0]]), 1, 1, idx_mapping=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(PlanError, match="idx_mapping is int64"):
        shard_slots(i32([[0]]), i32([0]), long, ALONE, out=i32([[0]]))
    with pytest.raises(PlanError, match=r"counts is int32 \[2\]"):
        compact_slots(i32([[0]]), out=i32([[0]]), counts=i32([0, 0]))
    with pytest.raises(PlanError, match="rank_stride=0"):
        gathered_slots(i32([[0]]), i32([0]), ALONE, rank_stride=0, out=i32([[0]]))
