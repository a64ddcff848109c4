"""Keys of a paged indexer cache made contiguous through block tables, in one launch: no slots are computed first.

Rows of 3 and 2 keys, block_size=2, block tables 5 3 and 8 0:

    local_start     0     3   5
    key             0  1  2  3  4
    block           5  5  3  8  8
    offset          0  1  0  0  1

`table_keys` reads this rank's cache, `pack_table_keys` the same into the shard that a rank sends (key_shards.py).
`pull_table_keys` reads the caches of all ranks of the DCP group where they lie, and writes token order: no shard is
copied before it travels. A block id names one block on each rank of the group, so all ranks use the same tables.

A key that does not exist (at or behind key_lens, behind the table, in a block outside the cache) reads nothing and
comes as zeros: value 0, scale 0.

cache: [num_blocks, page_bytes] uint8 in the layout of index_cache.py. local_start: [num_rows + 1] int32, where each
row's keys start in the result (of one rank); rows without keys of their own are skipped. block_tables: [num_rows,
width] int32. key_lens: [num_rows] int32, keys of the workspace that exist in each row: of this rank, or of all ranks
for `pull_table_keys`. first_key: index in its shard of the first key of every row, above 0 in a later key span.
Result: values [num_keys, dim] float8_e4m3fn, scales [num_keys] fp32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_tensor
from cpkit.kernels.gather_keys import copy_keys, grid, keys_out, out_words, row_sizes
from cpkit.kernels.index_cache import SCALE_BYTES, gather_index_keys
from cpkit.kernels.key_shards import IndexKeys, PackedShard, check_dim, check_regions, find_places, search_steps
from cpkit.kernels.table_slots import table_slots_reference
from cpkit.kernels.words import WORD, as_words, stride_unit


@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """Where the keys of a workspace lie in paged caches; the tensors are those of the module's first lines.

    num_keys: of the workspace on one rank, padding included. block_size: keys of a block.
    """

    local_start: torch.Tensor
    block_tables: torch.Tensor
    key_lens: torch.Tensor
    num_keys: int
    block_size: int
    first_key: int = 0

    def check(self, device: torch.device) -> None:
        """Raise PlanError unless the parts fit each other."""
        check_positive(block_size=self.block_size)
        num_rows = self.key_lens.numel()
        check_tensor("key_lens", self.key_lens, torch.int32, (num_rows,), device)
        check_tensor("local_start", self.local_start, torch.int32, (num_rows + 1,), device)
        check_tensor("block_tables", self.block_tables, torch.int32, (num_rows, None), device)
        if self.num_keys < 0 or self.first_key < 0:
            raise PlanError(f"num_keys={self.num_keys}, first_key={self.first_key}: neither is negative")

    def sizes(self, dcp_size: int, interleave: int, num_blocks: int) -> tuple[int, ...]:
        """What both kernels take behind their tensors."""
        num_rows, width = self.block_tables.shape
        rows = (self.num_keys * dcp_size, num_rows, search_steps(num_rows), dcp_size, interleave)
        return *rows, self.block_size, num_blocks, width, self.block_tables.stride(0), self.first_key


def table_keys_reference(cache: torch.Tensor, table: KeyTable, dim: int) -> IndexKeys:
    if not table.num_keys or not table.block_tables.numel():
        slots = torch.full((table.num_keys,), -1, dtype=torch.int64, device=cache.device)
    else:
        slots = table_slots_reference(
            table.local_start,
            table.block_tables,
            table.key_lens + table.first_key,
            table.num_keys,
            block_size=table.block_size,
            first_key=table.first_key,
        )
    return gather_index_keys(cache, slots, block_size=table.block_size, dim=dim)


@triton.jit
def _keys_of_program(
    local_start, block_tables, key_lens, num_keys, num_rows, steps, dcp_size, interleave, block_size, num_blocks, width,
    table_stride, first_key, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS keys of the result, which of them are inside it; owner, block, offset and existence of each.

    What does not exist is in block 0.
    """
    key = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = key < num_keys
    key_inside = tl.minimum(key, num_keys - 1)
    row, at, owner, local = find_places(local_start, key_inside, num_rows, steps, dcp_size, interleave)
    index = local + first_key
    column = index // block_size
    exists = here & (at < tl.load(key_lens + row)) & (column < width)
    block = tl.load(block_tables + row.to(tl.int64) * table_stride + column, mask=exists, other=-1)
    exists = exists & (block >= 0) & (block < num_blocks)
    return key, here, owner, tl.where(exists, block, 0).to(tl.int64), index - column * block_size, exists


@triton.jit
def _copy_from_pages(
    page, offset, block_size, out_values, out_scales, key, exists, here, WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr
):
    """Move the keys at an offset of each page, whose scales lie behind its block_size keys; out_scales: [ROWS]."""
    from_scales = page + (block_size * WORDS + offset)
    copy_keys(page + offset * WORDS, from_scales, out_values, out_scales, key, exists, here, WORDS, BLOCK_WORDS)


_SIZES = [
    "num_keys", "num_rows", "steps", "dcp_size", "interleave", "block_size", "num_blocks", "width", "table_stride",
    "first_key", "page_stride",
]  # fmt: skip


@triton.jit(
    do_not_specialize=[*_SIZES, "num_behind", "behind", "front"],
    do_not_specialize_on_alignment=["local_start", "block_tables", "key_lens", "out_scales"],
)
def _table_keys_kernel(
    cache, local_start, block_tables, key_lens, out_values, out_scales,
    num_keys: tl.int32, num_rows: tl.int32, steps: tl.int32, dcp_size: tl.int32, interleave: tl.int32,
    block_size: tl.int32, num_blocks: tl.int32, width: tl.int32, table_stride: tl.int64, first_key: tl.int32,
    page_stride: tl.int64, num_behind: tl.int32, behind: tl.int64, front: tl.int64,
    WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """page_stride: in units of UNIT words. Scale of key k: word behind + k of out_scales, or front + k from key
    num_behind on.
    """
    key, here, _, block, offset, exists = _keys_of_program(
        local_start, block_tables, key_lens, num_keys, num_rows, steps, dcp_size, interleave, block_size, num_blocks,
        width, table_stride, first_key, ROWS,
    )  # fmt: skip
    page = cache + block * (page_stride * UNIT)
    to_scales = out_scales + key + tl.where(key < num_behind, behind, front)
    _copy_from_pages(page, offset, block_size, out_values, to_scales, key, exists, here, WORDS, BLOCK_WORDS)


@triton.jit(
    do_not_specialize=_SIZES,
    do_not_specialize_on_alignment=["peers", "local_start", "block_tables", "key_lens", "out_scales"],
)
def _pull_table_keys_kernel(
    peers, local_start, block_tables, key_lens, out_values, out_scales,
    num_keys: tl.int32, num_rows: tl.int32, steps: tl.int32, dcp_size: tl.int32, interleave: tl.int32,
    block_size: tl.int32, num_blocks: tl.int32, width: tl.int32, table_stride: tl.int64, first_key: tl.int32,
    page_stride: tl.int64, WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same from the caches of all ranks; peers: [dcp_size] int64, their addresses, multiples of 16."""
    key, here, owner, block, offset, exists = _keys_of_program(
        local_start, block_tables, key_lens, num_keys, num_rows, steps, dcp_size, interleave, block_size, num_blocks,
        width, table_stride, first_key, ROWS,
    )  # fmt: skip
    cache = tl.multiple_of(tl.load(peers + owner).to(tl.pointer_type(tl.int32)), (16,))
    page = cache + block * (page_stride * UNIT)
    _copy_from_pages(page, offset, block_size, out_values, out_scales + key, key, exists, here, WORDS, BLOCK_WORDS)


def table_keys(
    cache: torch.Tensor, table: KeyTable, dim: int, *, out: IndexKeys | None = None, backend: str = "torch"
) -> IndexKeys:
    """Keys of this rank's cache, row after row, side by side."""
    _check_own(cache, table, dim, backend)
    out = keys_out(out, table.num_keys, dim, cache.device)
    if backend == "torch":
        values, scales = table_keys_reference(cache, table, dim)
        out[0].view(torch.uint8).copy_(values.view(torch.uint8))
        out[1].copy_(scales)
    elif table.num_keys:
        _launch_own(cache, table, dim, out, (table.num_keys, 0, 0))
    return out


def pack_table_keys(cache: torch.Tensor, table: KeyTable, shard: PackedShard, *, backend: str = "torch") -> None:
    """The same keys into the shard of table.num_keys keys that this rank sends."""
    _check_own(cache, table, shard.dim, backend)
    if shard.num_keys != table.num_keys:
        raise PlanError(f"{table.num_keys} keys for a shard of {shard.num_keys}: make it by empty_shard of as many")
    if not table.num_keys:
        return
    if backend == "torch":
        shard.fill(*table_keys_reference(cache, table, shard.dim))
    else:
        num_behind = shard.num_keys - shard.num_front
        places = (num_behind, shard.num_front + shard.num_keys * (shard.dim // WORD), -num_behind)
        _launch_own(cache, table, shard.dim, (shard.values(), shard.packed.view(torch.float32)), places)


def _check_own(cache: torch.Tensor, table: KeyTable, dim: int, backend: str) -> None:
    check_backend("table_keys", backend, BACKENDS, compiled=_table_keys_kernel, device=cache.device)
    _check_cache(cache, table, dim)
    check_regions(table.local_start, table.num_keys, 1, 1, cache.device)


def _launch_own(
    cache: torch.Tensor,
    table: KeyTable,
    dim: int,
    out: tuple[torch.Tensor, torch.Tensor],
    places: tuple[int, int, int],
) -> None:
    """out: values, and the words among which the scales have their places: num_behind, behind, front of the kernel."""
    words = _page_words(cache, table, dim)
    unit = stride_unit(words)
    strides = (words.stride(0) // unit, *places)
    _table_keys_kernel[grid(table.num_keys)](
        words, table.local_start, table.block_tables, table.key_lens, *out_words(out),
        *table.sizes(1, 1, len(cache)), *strides, UNIT=unit, **row_sizes(dim),
    )  # fmt: skip


def pull_table_keys(
    peers: torch.Tensor,
    cache: torch.Tensor,
    table: KeyTable,
    dim: int,
    *,
    interleave: int,
    out: IndexKeys | None = None,
) -> IndexKeys:
    """Keys of all ranks in token order, read from the caches themselves.

    peers: [dcp_size] int64 on the device, addresses of the ranks' caches, all of the shape and strides of `cache`, this
    rank's own. Nobody may write the keys that are read until the launch is over. interleave in keys.
    """
    check_tensor("peers", peers, torch.int64, (None,), cache.device)
    dcp_size = peers.numel()
    check_backend("pull_table_keys", "triton", BACKENDS, compiled=_pull_table_keys_kernel, device=cache.device)
    _check_cache(cache, table, dim)
    check_regions(table.local_start, table.num_keys, dcp_size, interleave, cache.device)
    out = keys_out(out, table.num_keys * dcp_size, dim, cache.device)
    if table.num_keys:
        words = _page_words(cache, table, dim)
        unit = stride_unit(words)
        _pull_table_keys_kernel[grid(table.num_keys * dcp_size)](
            peers, table.local_start, table.block_tables, table.key_lens, *out_words(out),
            *table.sizes(dcp_size, interleave, len(cache)), words.stride(0) // unit, UNIT=unit, **row_sizes(dim),
        )  # fmt: skip
    return out


def _check_cache(cache: torch.Tensor, table: KeyTable, dim: int) -> None:
    check_tensor("cache", cache, torch.uint8, (None, None), cache.device)
    table.check(cache.device)
    need = table.block_size * (dim + SCALE_BYTES)
    check_dim(dim)
    if cache.shape[1] < need:
        raise PlanError(
            f"pages of {cache.shape[1]} bytes for {table.block_size} keys of {dim} values and a scale: a page holds at "
            f"least {need} bytes"
        )


def _page_words(cache: torch.Tensor, table: KeyTable, dim: int) -> torch.Tensor:
    return as_words("cache", cache[:, : table.block_size * (dim + SCALE_BYTES)])
