"""Picked pools as the keys that tokens attend, against the keys of each token told off one by one."""

import pytest
import torch

from cpkit.errors import PlanError
from cpkit.kernels.pool_keys import pool_keys


def attended(pools, num_keys, pool):
    """Keys of one token: those of the pools that are whole, then what is left of it."""
    keys = list(range(num_keys))
    whole = [keys[first : first + pool] for first in range(0, num_keys - pool + 1, pool)]
    members = [key for one in pools if 0 <= one < len(whole) for key in whole[one]]
    return members + keys[pool * len(whole) :]


@pytest.mark.parametrize("pool", [1, 4, 5])
@pytest.mark.parametrize("num_keys", [0, 1, 3, 4, 5, 8, 19, 20, 21, 40])
@pytest.mark.parametrize("pools", [[], [0], [3, -1, 1], [-1, -1], [9, 0, -7, 2**40]], ids=str)
def test_whole_pools_and_the_tail(pool, num_keys, pools):
    picked = torch.tensor([pools, pools], dtype=torch.int64).view(2, len(pools))
    found = pool_keys(picked, torch.tensor([num_keys, 0]), pool=pool)
    assert found.shape == (2, len(pools) * pool + pool - 1)
    assert [key for key in found[0].tolist() if key >= 0] == attended(pools, num_keys, pool)
    assert found[1].tolist() == [-1] * found.shape[1]


def test_b113_the_tail_is_attended_where_fewer_pools_are_whole_than_picked():
    found = pool_keys(torch.tensor([[0, 1, -1, -1]]), torch.tensor([10]), pool=4)[0].tolist()
    assert found == [*range(8), *[-1] * 8, 8, 9, -1]


def test_b115_garbage_in_the_pools_of_a_short_row_names_no_key():
    """Contexts of 3 and 40 tokens: the first has no pool, whatever its row of picked pools holds."""
    picked = torch.tensor([[7, -(2**62), 2**62, 0], [9, 8, 7, 6]])
    short, long = pool_keys(picked, torch.tensor([3, 40]), pool=4).tolist()
    assert short == [*[-1] * 16, 0, 1, 2]
    assert long == [*range(36, 40), *range(32, 36), *range(28, 32), *range(24, 28), -1, -1, -1]


def test_a_part_of_wider_rows():
    wide = torch.arange(12).view(2, 6)
    assert pool_keys(wide[:, 1:3], torch.tensor([8, 99]), pool=3).tolist() == [
        [3, 4, 5, -1, -1, -1, 6, 7],
        [21, 22, 23, 24, 25, 26, -1, -1],
    ]


def test_refusals():
    with pytest.raises(PlanError, match="pools is int32"):
        pool_keys(torch.zeros(1, 2, dtype=torch.int32), torch.tensor([4]), pool=2)
    with pytest.raises(PlanError, match=r"num_keys is int64 \[2\]"):
        pool_keys(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([4, 4]), pool=2)
    with pytest.raises(PlanError, match="pool=0"):
        pool_keys(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([4]), pool=0)
