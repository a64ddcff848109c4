"""Index keys of the gather benchmarks: random bytes in pages, and what two results must have in common."""

import torch

from cpkit.kernels.key_shards import IndexKeys
from cpkit.kernels.table_keys import KeyTable

DIM, BLOCK = 128, 64
ROW = DIM + 4
SIZES = (131_072, 1 << 20)


def some_bytes(*shape: int) -> torch.Tensor:
    """Random bytes without the two NaN codes of e4m3, so that results compare as numbers too."""
    return torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")


def same(got: IndexKeys, want: IndexKeys) -> None:
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)), "values differ"
    assert torch.equal(got[1].view(torch.int32), want[1].view(torch.int32)), "scales differ"


def paged(num_keys: int) -> tuple[torch.Tensor, KeyTable]:
    """A cache whose blocks lie in random order, and the table of 4 requests that fill it."""
    num_blocks = num_keys // BLOCK
    cache = some_bytes(num_blocks, BLOCK * ROW)
    tables = torch.randperm(num_blocks, device="cuda").int().view(4, -1)
    start = torch.arange(5, dtype=torch.int32, device="cuda") * (num_keys // 4)
    return cache, KeyTable(start, tables, start.diff().int(), num_keys, BLOCK)
