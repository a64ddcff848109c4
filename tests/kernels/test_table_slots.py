"""Slots of a workspace's keys against keys placed one after the other."""

import pytest
import torch

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.table_slots import table_slots
from tests.oracles import block_slot


def slow_slots(counts, tables, held, block_size, first_key, num_keys):
    slots = []
    for count, table, lens in zip(counts, tables, held, strict=True):
        for index in range(first_key, first_key + count):
            inside = index < lens and index // block_size < len(table)
            slots.append(block_slot(table, index, block_size) if inside else -1)
    return (slots + [-1] * num_keys)[:num_keys]


@pytest.mark.parametrize(
    ("counts", "held", "first_key", "num_keys"),
    [
        pytest.param([3, 2], [3, 2], 0, 5, id="drawn"),
        pytest.param([2, 0, 4], [2, 0, 4], 0, 6, id="row-without-keys"),
        pytest.param([4, 4], [4, 3], 0, 8, id="padded-to-a-larger-shard"),
        pytest.param([4, 0, 4], [4, 0, 0], 0, 8, id="shared-region-and-empty-shard"),
        pytest.param([3], [6], 3, 3, id="second-span"),
        pytest.param([3], [4], 3, 3, id="second-span-of-a-shorter-shard"),
        pytest.param([9], [9], 0, 9, id="past-the-block-table"),
        pytest.param([3, 2], [3, 2], 0, 8, id="workspace-longer-than-its-rows"),
        pytest.param([2], [5], 0, 4, id="first-span-in-a-longer-workspace"),
        pytest.param([0, 0], [0, 0], 0, 0, id="no-keys"),
        pytest.param([1], [1], 0, 1, id="one-key"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots(counts, held, first_key, num_keys, dtype):
    tables = [[5, 3, 9, 2], [8, 7, 1, 6], [4, 11, 12, 13]][: len(counts)]
    loc = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=dtype)
    got = table_slots(
        loc,
        torch.tensor(tables, dtype=torch.int32),
        torch.tensor(held, dtype=dtype),
        num_keys,
        block_size=2,
        first_key=first_key,
    )
    assert got.dtype == torch.int64
    assert got.tolist() == slow_slots(counts, tables, held, 2, first_key, num_keys)


def test_far_blocks_pass_2_31():
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    got = table_slots(torch.tensor([0, 2]), table, torch.tensor([2]), 2, block_size=256)
    assert got.tolist() == [(2**31 - 1) * 256, (2**31 - 1) * 256 + 1]


def test_tables_without_columns_hold_nothing():
    tables = torch.zeros(1, 0, dtype=torch.int32)
    assert table_slots(torch.tensor([0, 2]), tables, torch.tensor([2]), 2, block_size=4).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"key_lens": torch.tensor([1, 2])}, PlanError, "key_start_loc", id="rows-disagree"),
        pytest.param({"block_tables": torch.zeros(1, 2, dtype=torch.int64)}, PlanError, "block_tables", id="int64"),
        pytest.param({"num_keys": -1}, PlanError, "num_keys=-1", id="negative-count"),
        pytest.param({"first_key": -1}, PlanError, "first_key=-1", id="negative-first"),
        pytest.param({"backend": "cuda"}, ConfigError, "cuda", id="backend-not-built"),
    ],
)
def test_refusals(change, error, words):
    call = {
        "key_start_loc": torch.tensor([0, 1]),
        "block_tables": torch.zeros(1, 2, dtype=torch.int32),
        "key_lens": torch.tensor([1]),
        "num_keys": 1,
        "block_size": 2,
    } | change
    with pytest.raises(error, match=words):
        table_slots(**call)
