"""Rows of bytes in the pages of a cache: the main bytes of all rows of a block, then their side bytes (scales).

block_size=3, rows of 4 main and 2 side bytes:

    byte of the page    0    4    8    12 14 16 18
                        mmmm mmmm mmmm ss ss ss ....      .... belongs to somebody else, or to nobody
    offset in block     0    1    2    0  1  2

    slot = block * block_size + offset; row: mmmmss, its bytes side by side, as they travel between ranks

A slot outside the cache, -1 among them, is no row: nothing is written there, and zeros are read.

cache: [num_blocks, page_bytes] uint8; pages may lie apart, and hold more than the rows. rows: [num_rows, main + side]
uint8. slots: [num_rows] int64, those written distinct. Addresses are int64: block * page stride passes
2^31 in real caches.
"""

import torch

from cpkit.errors import PlanError
from cpkit.kernels.backends import check_backend
from cpkit.kernels.checks import check_positive, check_tensor


def write_rows_reference(
    cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, block_size: int, side_bytes: int
) -> None:
    main_bytes = rows.shape[1] - side_bytes
    main, side = _views(cache, block_size, main_bytes, side_bytes)
    kept = _inside(slots, cache, block_size)
    block, offset = slots[kept] // block_size, slots[kept] % block_size
    main[block, offset] = rows[kept, :main_bytes]
    side[block, offset] = rows[kept, main_bytes:]


def write_rows(
    cache: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    block_size: int,
    side_bytes: int,
    backend: str = "torch",
) -> None:
    """Write each row to its slot; the last side_bytes of a row go behind the block's main bytes."""
    check_backend("write_rows", backend)
    check_tensor("rows", rows, torch.uint8, (slots.shape[0], None), cache.device)
    _check(cache, slots, block_size, rows.shape[1] - side_bytes, side_bytes)
    write_rows_reference(cache, rows, slots, block_size=block_size, side_bytes=side_bytes)


def read_rows_reference(
    cache: torch.Tensor, slots: torch.Tensor, *, block_size: int, main_bytes: int, side_bytes: int
) -> torch.Tensor:
    main, side = _views(cache, block_size, main_bytes, side_bytes)
    kept = _inside(slots, cache, block_size)
    block, offset = slots[kept] // block_size, slots[kept] % block_size
    rows = cache.new_zeros(slots.numel(), main_bytes + side_bytes)
    rows[kept] = torch.cat([main[block, offset], side[block, offset]], dim=1)
    return rows


def read_rows(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    block_size: int,
    main_bytes: int,
    side_bytes: int,
    backend: str = "torch",
) -> torch.Tensor:
    """[num_rows, main_bytes + side_bytes] uint8, the rows in the slots; zeros where there is none."""
    check_backend("read_rows", backend)
    _check(cache, slots, block_size, main_bytes, side_bytes)
    return read_rows_reference(cache, slots, block_size=block_size, main_bytes=main_bytes, side_bytes=side_bytes)


def bytes_as(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Some bytes of each row, read as another dtype: copied, since they may start and step at any address."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


def _views(cache: torch.Tensor, block_size: int, main_bytes: int, side_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_blocks, block_size, main_bytes] and [num_blocks, block_size, side_bytes], both in the cache's memory."""
    main, side = block_size * main_bytes, block_size * side_bytes
    blocks = cache.shape[0]
    return (
        cache[:, :main].view(blocks, block_size, main_bytes),
        cache[:, main : main + side].view(blocks, block_size, side_bytes),
    )


def _inside(slots: torch.Tensor, cache: torch.Tensor, block_size: int) -> torch.Tensor:
    return (slots >= 0) & (slots < cache.shape[0] * block_size)


def _check(cache: torch.Tensor, slots: torch.Tensor, block_size: int, main_bytes: int, side_bytes: int) -> None:
    check_positive(block_size=block_size, main_bytes=main_bytes)
    check_tensor("cache", cache, torch.uint8, (None, None), cache.device)
    check_tensor("slots", slots, torch.int64, (None,), cache.device)
    need = block_size * (main_bytes + side_bytes)
    if cache.shape[1] < need:
        raise PlanError(
            f"pages of {cache.shape[1]} bytes for {block_size} rows of {main_bytes} + {side_bytes} bytes: a page holds "
            f"at least {need}; check block_size and the cache's row format"
        )
