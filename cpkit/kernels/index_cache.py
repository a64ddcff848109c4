"""The indexer's cache: keys of e4m3 values with one fp32 scale each, 132 bytes at 128 values.

A page holds the values of all its rows, then all their scales. block_size=2, dim=4:

    byte    0    4    8    12   16
            vvvv vvvv ssss ssss           slot 0: bytes 0-3 and 8-11

A row that travels between ranks is its values, then its scale: vvvvssss.

cache: [num_blocks, page_bytes] uint8, page_bytes at least block_size * (dim + 4). values: [num_keys, dim]
float8_e4m3fn; scales: [num_keys] fp32. slots: [num_keys] int64; -1, or outside the cache: nothing is written, and
zeros are read.
"""

import torch

from cpkit.kernels.checks import check_tensor
from cpkit.kernels.paged_rows import bytes_as, read_rows, write_rows

SCALE_BYTES = 4


def pack_index_keys(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[num_keys, dim + 4] uint8, rows as they travel and as write_rows takes them."""
    check_tensor("values", values, torch.float8_e4m3fn, (None, None), values.device)
    check_tensor("scales", scales, torch.float32, (values.shape[0],), values.device)
    return torch.cat([values.view(torch.uint8), bytes_as(scales[:, None], torch.uint8)], dim=1)


def unpack_index_keys(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of packed rows, each contiguous; undoes pack_index_keys."""
    check_tensor("rows", rows, torch.uint8, (None, None), rows.device)
    values, scales = rows[:, :-SCALE_BYTES], rows[:, -SCALE_BYTES:]
    return bytes_as(values, torch.float8_e4m3fn), bytes_as(scales, torch.float32).view(-1)


def insert_index_keys(
    cache: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    slots: torch.Tensor,
    *,
    block_size: int,
    backend: str = "torch",
) -> None:
    """Write each key to its slot."""
    rows = pack_index_keys(values, scales)
    write_rows(cache, rows, slots, block_size=block_size, side_bytes=SCALE_BYTES, backend=backend)


def gather_index_keys(
    cache: torch.Tensor, slots: torch.Tensor, *, block_size: int, dim: int = 128, backend: str = "torch"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of the keys in the slots, side by side, as the scoring kernels read them."""
    return unpack_index_keys(
        read_rows(cache, slots, block_size=block_size, main_bytes=dim, side_bytes=SCALE_BYTES, backend=backend)
    )
