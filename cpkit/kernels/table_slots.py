"""Slots of the keys of a workspace: of each row's request one key after the other, through its block table.

block_size=2, rows of 3 and 2 keys, block tables 5 3 and 8 0:

    key_start_loc  0 3 5
    workspace key  0  1  2  3  4
    slot          10 11  6 16 17

With first_key=2 and key_lens 5 2, a later span of the first row's request (block table 5 3 9): 6 7 18.

key_start_loc: [num_rows + 1] int32 or int64, where each row's keys start; of rows that share a request's keys the first
counts them, the others none. block_tables: [num_rows, width] int32. key_lens: [num_rows] int32 or int64, keys that this
rank stores of each request: a workspace padded to another rank's larger shard reads nothing (-1) for the difference.
Result: [num_keys] int64, -1 also behind the last row and behind the block table.
"""

import torch

from cpkit.errors import PlanError
from cpkit.kernels.backends import check_backend
from cpkit.kernels.checks import INTS, check_positive, check_tensor
from cpkit.planner.slots import PAD


def table_slots_reference(
    key_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    key_lens: torch.Tensor,
    num_keys: int,
    *,
    block_size: int,
    first_key: int,
) -> torch.Tensor:
    key = torch.arange(num_keys, device=key_start_loc.device)
    row = torch.searchsorted(key_start_loc[1:].long(), key, right=True)
    behind = row >= len(key_lens)
    row = row.clamp(max=len(key_lens) - 1)
    index = first_key + key - key_start_loc[row]
    column = index // block_size
    last = block_tables.shape[1] - 1
    block = block_tables[row, column.clamp(max=last)].long()
    here = ~behind & (index < key_lens[row]) & (column <= last)
    return torch.where(here, block * block_size + index % block_size, PAD)


def table_slots(
    key_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    key_lens: torch.Tensor,
    num_keys: int,
    *,
    block_size: int,
    first_key: int = 0,
    backend: str = "torch",
) -> torch.Tensor:
    """[num_keys] int64; num_keys: of the workspace; first_key: place in the shard where a later key span starts."""
    check_backend("table_slots", backend)
    check_positive(block_size=block_size)
    num_rows, device = key_lens.shape[0], key_start_loc.device
    check_tensor("key_start_loc", key_start_loc, INTS, (num_rows + 1,), device)
    check_tensor("block_tables", block_tables, torch.int32, (num_rows, None), device)
    check_tensor("key_lens", key_lens, INTS, (num_rows,), device)
    if num_keys < 0 or first_key < 0:
        raise PlanError(f"num_keys={num_keys}, first_key={first_key}: neither is negative")
    if not num_keys or not block_tables.numel():
        return torch.full((num_keys,), PAD, dtype=torch.int64, device=device)
    return table_slots_reference(
        key_start_loc, block_tables, key_lens, num_keys, block_size=block_size, first_key=first_key
    )
