"""The indexer's cache: keys of e4m3 values with one fp32 scale each, 132 bytes at 128 values.

A page holds the values of all its rows, then all their scales. block_size=2, dim=4:

    byte    0    4    8    12   16
            vvvv vvvv ssss ssss           slot 0: bytes 0-3 and 8-11

A row that travels between ranks is its values, then its scale: vvvvssss.

cache: [num_blocks, page_bytes] uint8, page_bytes at least block_size * (dim + 4). values: [num_keys, dim]
float8_e4m3fn; scales: [num_keys] fp32. slots: [num_keys] int64, those written distinct; -1, or outside the cache:
nothing is written, and zeros are read.
"""

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_tensor
from cpkit.kernels.fp8 import FLOATS, GROUPS, group_sizes, quantize_fp8_reference, quantize_groups, value_unit
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


def quantize_index_keys_reference(
    cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, *, block_size: int, pow2_scales: bool
) -> None:
    values, scales = quantize_fp8_reference(keys, group_size=keys.shape[1], pow2_scales=pow2_scales)
    insert_index_keys(cache, values, scales[:, 0], slots, block_size=block_size)


@triton.jit(
    do_not_specialize=["num_keys", "num_blocks", "block_size", "key_stride", "page_stride"],
    do_not_specialize_on_alignment=["slots", "cache_scales"],
)
def _quantize_index_keys_kernel(
    keys, slots, cache, cache_scales, num_keys: tl.int64, num_blocks: tl.int64, block_size: tl.int64,
    key_stride: tl.int64, page_stride: tl.int64, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr,
    PAGE_UNIT: tl.constexpr, POW2: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """GROUPS keys; key_stride in units of UNIT values, page_stride in units of PAGE_UNIT bytes."""
    key = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    slot = tl.load(slots + key, mask=key < num_keys, other=-1)
    kept = (slot >= 0) & (slot < num_blocks * block_size)
    slot = tl.where(kept, slot, 0)
    lane = tl.arange(0, BLOCK_SIZE)[None, :]
    mask = kept[:, None] & (lane < SIZE)
    found = tl.load(keys + (key * (key_stride * UNIT))[:, None] + lane, mask=mask, other=0.0).to(tl.float32)
    rounded, scale = quantize_groups(found, POW2)
    block = slot // block_size
    offset = slot - block * block_size
    page = block * (page_stride * PAGE_UNIT)
    tl.store(cache + (page + offset * SIZE)[:, None] + lane, rounded, mask=mask)
    tl.store(cache_scales + (page + block_size * SIZE) // 4 + offset, scale, mask=kept)


def quantize_index_keys(
    cache: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    *,
    block_size: int,
    pow2_scales: bool = False,
    backend: str = "torch",
) -> None:
    """Quantize keys ([num_keys, dim] fp32, bf16 or fp16), each with one scale, and write each to its slot."""
    check_backend("quantize_index_keys", backend, BACKENDS, compiled=_quantize_index_keys_kernel, device=cache.device)
    check_positive(block_size=block_size)
    check_tensor("cache", cache, torch.uint8, (None, None), cache.device)
    check_tensor("slots", slots, torch.int64, (None,), cache.device)
    check_tensor("keys", keys, FLOATS, (slots.numel(), None), cache.device)
    num_keys, dim = keys.shape
    need = block_size * (dim + SCALE_BYTES)
    if dim % SCALE_BYTES or not dim or cache.shape[1] < need:
        raise PlanError(
            f"keys of {dim} values in pages of {cache.shape[1]} bytes: dim must be a multiple of {SCALE_BYTES}, and a "
            f"page holds at least {need} bytes for {block_size} keys; check block_size and the cache's row format"
        )
    if backend == "torch":
        quantize_index_keys_reference(cache, keys, slots, block_size=block_size, pow2_scales=pow2_scales)
        return
    if cache.stride(0) % SCALE_BYTES or cache.data_ptr() % 16:
        raise PlanError(
            f"pages {cache.stride(0)} bytes apart from byte {cache.data_ptr() % 16} of 16: kernels write words of "
            f"{SCALE_BYTES} bytes from a 16-byte boundary; allocate the cache so"
        )
    if num_keys and len(cache):
        pages = cache[:, :need]
        unit, page_unit = value_unit(keys, dim), 16 if cache.stride(0) % 16 == 0 else SCALE_BYTES
        sizes = (num_keys, len(cache), block_size, keys.stride(0) // unit, cache.stride(0) // page_unit)
        _quantize_index_keys_kernel[(triton.cdiv(num_keys, GROUPS),)](
            keys, slots, pages.view(torch.float8_e4m3fn), pages.view(torch.float32), *sizes,
            UNIT=unit, PAGE_UNIT=page_unit, **group_sizes(dim, pow2_scales),
        )  # fmt: skip
