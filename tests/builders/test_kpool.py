"""Kpool tail builds: every token's row of its request's circular block, placed one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.budget import Budget
from cpkit.builders.common import rank_batch
from cpkit.builders.graphs import GraphSupport
from cpkit.builders.kpool import KpoolBuilder, KpoolConfig
from cpkit.errors import ConfigError, PlanError

BUDGET = Budget(workspace_tokens=100, max_num_batched_tokens=64, max_num_seqs=8)


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=5),
    kpool=st.sampled_from([1, 3, 4]),
    padding=st.integers(0, 3),
)
def test_tokens_go_round_their_block(rows, kpool, padding):
    positions = [pos for before, new, _ in rows for pos in range(before, before + new)]
    blocks = [block for _, new, block in rows for _ in range(new)]
    ring = {}
    for before, new, block in rows:
        row = 0
        for pos in range(before + new):
            ring[block, pos], row = block * kpool + row, row + 1 if row + 1 < kpool else 0
    want = [ring[block, pos] if block else -1 for block, pos in zip(blocks, positions, strict=True)]
    slots = [900 + i for i in range(len(positions))] + [-1] * padding
    batch = rank_batch(
        [new for _, new, _ in rows],
        [before + new for before, new, _ in rows],
        [[block, 77] for *_, block in rows],
        slots,
        num_tokens=len(positions),
        positions=positions,
    )
    builder = KpoolBuilder(KpoolConfig(BUDGET, kpool))
    builder._slots.tensor.fill_(55)
    built = builder.build(batch)
    assert built.slot_mapping.tolist() == want + [-1] * padding
    assert (builder._slots.tensor[len(slots) :] == -1).all()


def test_without_positions_slots_are_kept():
    built = KpoolBuilder(KpoolConfig(BUDGET, 4)).build(rank_batch([2], [2], [[3]], [12, -1]))
    assert built.slot_mapping.tolist() == [12, -1]
    assert built.slot_mapping.data_ptr() != rank_batch([2], [2], [[3]], [12, -1]).slot_mapping.data_ptr()


def test_only_single_tokens_are_decodes():
    split = KpoolBuilder(KpoolConfig(BUDGET, 4)).build(rank_batch([1, 2], [3, 2], [[3], [4]], [0] * 3)).split
    assert tuple(split) == (1, 1, 1, 2)
    assert KpoolBuilder.graph_support is GraphSupport.ALWAYS


def test_tokens_behind_the_devices_last_boundary_belong_to_the_last_row():
    batch = rank_batch([1, 2], [3, 7], [[3], [4]], [0, 0, 0], positions=[2, 5, 6])
    batch.query_start_loc[-1] = 2
    assert KpoolBuilder(KpoolConfig(BUDGET, 4)).build(batch).slot_mapping.tolist() == [14, 17, 18]


def test_padding_that_a_graph_adds_writes_nothing():
    batch = rank_batch([1, 1], [3, 6], [[3], [4]], [0, 0, -1], positions=[2, 5, 0])
    assert KpoolBuilder(KpoolConfig(BUDGET, 4)).build(batch).slot_mapping.tolist() == [14, 17, -1]


def test_refusals():
    with pytest.raises(ConfigError, match="kpool=0"):
        KpoolConfig(BUDGET, 0)
    builder = KpoolBuilder(KpoolConfig(BUDGET, 4))
    empty = torch.zeros(0, dtype=torch.int32)
    with pytest.raises(PlanError, match="2 tokens and block_tables of shape"):
        builder.build(rank_batch([2], [2], np.zeros((1, 0), int), [0, 0], positions=[0, 1]))
    with pytest.raises(PlanError, match="65 tokens, but the builder's buffers hold 64: raise max_num_batched_tokens"):
        builder.build(rank_batch([65], [65], [[3]], [0] * 65))
    with pytest.raises(PlanError, match="tail slot_mapping: a step needs 65 of a buffer of 64"):
        builder.build(rank_batch([1], [1], [[3]], [0] * 65, num_tokens=1))
    assert builder.build(rank_batch([], [], np.zeros((0, 1), int), [], positions=[])).slot_mapping.shape == empty.shape
