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
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_tensor
from cpkit.kernels.words import WORD, as_words, stride_unit

ROWS = 16
"""Rows of one program."""


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
    check_backend("write_rows", backend, BACKENDS, compiled=_move_rows_kernel, device=cache.device)
    check_tensor("rows", rows, torch.uint8, (slots.shape[0], None), cache.device)
    _check(cache, slots, block_size, rows.shape[1] - side_bytes, side_bytes)
    if backend == "torch":
        write_rows_reference(cache, rows, slots, block_size=block_size, side_bytes=side_bytes)
    else:
        _move_rows(cache, rows, slots, block_size, side_bytes, write=True)


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
    check_backend("read_rows", backend, BACKENDS, compiled=_move_rows_kernel, device=cache.device)
    _check(cache, slots, block_size, main_bytes, side_bytes)
    if backend == "torch":
        return read_rows_reference(cache, slots, block_size=block_size, main_bytes=main_bytes, side_bytes=side_bytes)
    rows = cache.new_empty(slots.numel(), main_bytes + side_bytes)
    _move_rows(cache, rows, slots, block_size, side_bytes, write=False)
    return rows


@triton.jit(
    do_not_specialize=["num_rows", "num_blocks", "block_size", "page_stride", "row_stride"],
    do_not_specialize_on_alignment=["slots"],
)
def _move_rows_kernel(
    cache, rows, slots, num_rows: tl.int64, num_blocks: tl.int64, block_size: tl.int64, page_stride: tl.int64,
    row_stride: tl.int64, MAIN: tl.constexpr, SIDE: tl.constexpr, BLOCK_MAIN: tl.constexpr, BLOCK_SIDE: tl.constexpr,
    PAGE_UNIT: tl.constexpr, ROW_UNIT: tl.constexpr, WRITE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows, from cache to rows or, with WRITE, back; all sizes in words, strides in their units."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    slot = tl.load(slots + row, mask=here, other=-1)
    kept = (slot >= 0) & (slot < num_blocks * block_size)
    slot = tl.where(kept, slot, 0)
    block = slot // block_size
    offset = slot - block * block_size
    page = cache + block * (page_stride * PAGE_UNIT)
    word = tl.arange(0, BLOCK_MAIN)[None, :]
    stored = (page + offset * MAIN)[:, None] + word
    outer = (rows + row * (row_stride * ROW_UNIT))[:, None] + word
    if WRITE:
        mask = kept[:, None] & (word < MAIN)
        tl.store(stored, tl.load(outer, mask=mask), mask=mask)
    else:
        found = tl.load(stored, mask=kept[:, None] & (word < MAIN), other=0)
        tl.store(outer, found, mask=here[:, None] & (word < MAIN))
    if SIDE > 0:
        word = tl.arange(0, BLOCK_SIDE)[None, :]
        stored = (page + block_size * MAIN + offset * SIDE)[:, None] + word
        outer = (rows + row * (row_stride * ROW_UNIT) + MAIN)[:, None] + word
        if WRITE:
            mask = kept[:, None] & (word < SIDE)
            tl.store(stored, tl.load(outer, mask=mask), mask=mask)
        else:
            found = tl.load(stored, mask=kept[:, None] & (word < SIDE), other=0)
            tl.store(outer, found, mask=here[:, None] & (word < SIDE))


def _move_rows(
    cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, block_size: int, side_bytes: int, *, write: bool
) -> None:
    main_bytes = rows.shape[1] - side_bytes
    if main_bytes % WORD or side_bytes % WORD:
        raise PlanError(
            f"rows of {main_bytes} + {side_bytes} bytes: the kernel moves words of {WORD} bytes; name backend='torch'"
        )
    if not len(rows) or not len(cache):
        if not write:
            rows.zero_()
        return
    pages = as_words("cache", cache[:, : block_size * (main_bytes + side_bytes)])
    row_words = as_words("rows", rows)
    page_unit, row_unit = stride_unit(pages), stride_unit(row_words)
    strides = (pages.stride(0) // page_unit, row_words.stride(0) // row_unit)
    _move_rows_kernel[(triton.cdiv(len(rows), ROWS),)](
        pages, row_words, slots, len(rows), len(cache), block_size, *strides, PAGE_UNIT=page_unit, ROW_UNIT=row_unit,
        WRITE=int(write), **row_sizes(main_bytes, side_bytes),
    )  # fmt: skip


def row_sizes(main_bytes: int, side_bytes: int) -> dict[str, int]:
    """Constants of the kernel, in words, and its warps."""
    main, side = main_bytes // WORD, side_bytes // WORD
    blocks = {"BLOCK_MAIN": triton.next_power_of_2(main), "BLOCK_SIDE": triton.next_power_of_2(max(side, 1))}
    return {"MAIN": main, "SIDE": side, **blocks, "ROWS": ROWS, "num_warps": 4}


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
