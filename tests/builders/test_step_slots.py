"""Slots made in one launch before any builder runs are those that the builders make of them, one after another."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.budget import Budget
from cpkit.builders.common import rank_batch
from cpkit.builders.indexer import IndexerBuilder, IndexerConfig
from cpkit.builders.kpool import KpoolBuilder, KpoolConfig
from cpkit.kernels.backends import BACKENDS
from cpkit.kernels.compressed_slots import StateBlocks
from cpkit.kernels.step_slots import StateSlots, TailSlots, TokenSlots, step_slots
from cpkit.topology import Shard
from tests.builders.indexers import HOPPER

BLOCK, WIDTH, KPOOL = 8, 4, 4
BUDGET = Budget(workspace_tokens=1000, max_num_batched_tokens=64, max_num_seqs=8)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=4),
    dcp_size=st.integers(1, 3),
    ratio=st.sampled_from([2, 4]),
    padding=st.integers(0, 2),
)
def test_one_launch_and_the_builders_agree(backend, rows, dcp_size, ratio, padding):
    query_lens, seq_lens = [new for _, new in rows], [before + new for before, new in rows]
    total = sum(query_lens)
    positions = [pos for before, new in rows for pos in range(before, before + new)] + [0] * padding
    tables = 1 + np.arange(WIDTH * len(rows)).reshape(-1, WIDTH)
    for rank in range(dcp_size):
        shard = Shard(dcp_size=dcp_size, dcp_rank=rank, interleave=4)
        token, states, tail = (torch.full((total + padding,), 77) for _ in range(3))
        batch = rank_batch(query_lens, seq_lens, tables, token, is_prefilling=[True] * len(rows), positions=positions)
        blocks = StateBlocks(batch.block_tables, ratio, BLOCK // ratio)
        step_slots(
            batch.rows,
            TokenSlots(batch.block_tables, batch.slot_mapping, BLOCK, shard),
            StateSlots(blocks, states),
            TailSlots(batch.block_tables, tail, KPOOL),
            backend=backend,
        )
        config = IndexerConfig(BUDGET, HOPPER, shard, block_size=BLOCK, max_blocks=WIDTH, compress_ratio=ratio)
        assert torch.equal(IndexerBuilder(config, backend=backend).build(batch).slot_mapping, states)
        assert torch.equal(KpoolBuilder(KpoolConfig(BUDGET, KPOOL), backend=backend).build(batch).slot_mapping, tail)
