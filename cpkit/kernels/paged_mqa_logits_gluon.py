"""The decode logits of paged_mqa_logits.py on Hopper: pages stream in while two groups of warps score.

A decode step reads every key once: 8,448 bytes a page against 128 multiply-adds a key, query token and head. So a
program keeps pages under way and never lets the memory wait for the arithmetic:

    loader     block table -> TMA: the row's queries once, then pages, eight ahead: 64 keys and their 64 scales
    scorer 0   page 0: wgmma | ReLU, weigh, add, store |        page 2 ...
    scorer 1                   page 1: wgmma | ReLU, weigh, add, store |        page 3 ...

Keys are the tall side of the product (64 x columns, a column a query token's head), so the sum over heads stays within
a quad of lanes. A page is 66 lines of 128 bytes: 64 of values, 2 of scales; both are boxes of one matrix of lines. A
block outside the cache lies outside the matrix, and TMA fills such boxes with zeros.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cpkit.errors import PlanError

D = gl.constexpr(128)
PAGE = gl.constexpr(64)  # keys of a page
LINE = 128  # bytes
NUM_Q = gl.constexpr(2)  # rows whose queries are in shared memory: the next one's load while this one is scored
NUM_K = gl.constexpr(8)  # pages in shared memory

_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name in newer Triton; in 3.6


@gluon.jit
def _row_pages(row, page, work, TOKENS: gl.constexpr):
    """Of one row of the schedule: the page behind the last that this program reads."""
    seq_lens, num_tokens, max_keys, last_row, last_page, group = work
    token = group * TOKENS + gl.arange(0, TOKENS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    end = gl.load(seq_lens + row * num_tokens + token, mask=token < num_tokens, other=0)
    pages = gl.cdiv(gl.minimum(gl.max(end, axis=0), max_keys), PAGE)
    return gl.maximum(page, gl.where(row == last_row, gl.minimum(pages, last_page), pages))


@gluon.jit
def _load_partition(descs, first, work, tables, buffers, H: gl.constexpr, TOKENS: gl.constexpr):
    q_desc, k_desc, s_desc = descs
    block_tables, table_stride, page_lines = tables
    q_bufs, k_bufs, s_bufs, q_ready, q_free, k_ready, k_free = buffers
    row, page = first
    _, num_tokens, _, last_row, last_page, group = work
    turn = 0
    tile = 0
    while (row < last_row) | ((row == last_row) & (page < last_page)):
        stop = _row_pages(row, page, work, TOKENS)
        if page < stop:
            slot = turn % NUM_Q
            mbarrier.wait(q_free.index(slot), (turn // NUM_Q & 1) ^ 1)
            mbarrier.expect(q_ready.index(slot), TOKENS * H * D)
            column = (row * num_tokens + group * TOKENS) * H
            _tma_load(q_desc, [column, 0], q_ready.index(slot), q_bufs.index(slot))
            turn += 1
            table = block_tables + row.to(gl.int64) * table_stride
            block = gl.load(table + page)
            for number in range(page, stop):
                ahead = gl.load(table + gl.minimum(number + 1, stop - 1))
                stage = tile % NUM_K
                mbarrier.wait(k_free.index(stage), (tile // NUM_K & 1) ^ 1)
                mbarrier.expect(k_ready.index(stage), PAGE * (D + 4))
                line = block * page_lines
                _tma_load(k_desc, [line, 0], k_ready.index(stage), k_bufs.index(stage))
                _tma_load(s_desc, [line + PAGE, 0], k_ready.index(stage), s_bufs.index(stage))
                block = ahead
                tile += 1
        row += 1
        page = 0


@gluon.jit
def _score_partition(tensors, first, work, buffers, H: gl.constexpr, TOKENS: gl.constexpr, SCORER: gl.constexpr):
    weights, out, out_stride = tensors
    q_bufs, k_bufs, s_bufs, q_ready, q_free, k_ready, k_free = buffers
    row, page = first
    seq_lens, num_tokens, max_keys, last_row, last_page, group = work
    COLS: gl.constexpr = TOKENS * H
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    # The keys of a thread's two rows of the product, as [2 lines, 32 scales].
    scale_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [1, 0]], [], [2, 32]
    )
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, mma))
    turn = 0
    tile = 0
    while (row < last_row) | ((row == last_row) & (page < last_page)):
        stop = _row_pages(row, page, work, TOKENS)
        if page < stop:
            token = group * TOKENS + cols // H
            place = row.to(gl.int64) * num_tokens + token
            half_w = gl.load(weights + place * H + cols % H, mask=token < num_tokens, other=0.0) * 0.5
            slot = turn % NUM_Q
            mbarrier.wait(q_ready.index(slot), turn // NUM_Q & 1)
            q = q_bufs.index(slot).permute((1, 0))
            acc = gl.zeros([PAGE, COLS], gl.float32, mma)
            layout: gl.constexpr = gl.sum(acc.reshape([PAGE, TOKENS, H]), axis=2).type.layout
            offset = gl.expand_dims(gl.arange(0, PAGE, layout=gl.SliceLayout(1, layout)), 1)
            tokens = group * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
            rows = row.to(gl.int64) * num_tokens + tokens
            end = gl.load(seq_lens + rows, mask=tokens < num_tokens, other=0)
            end = gl.expand_dims(gl.minimum(end, max_keys), 0)
            target = gl.expand_dims(out + rows * out_stride, 0)
            # Pages alternate between the scorers over all rows, so the first of a row may be the other's.
            skip = (tile + SCORER) & 1
            for number in range(page + skip, stop, 2):
                at = tile + number - page
                stage = at % NUM_K
                mbarrier.wait(k_ready.index(stage), at // NUM_K & 1)
                run = warpgroup_mma(k_bufs.index(stage), q, acc, use_acc=False, is_async=True)
                scale = s_bufs.index(stage).load(scale_layout).reshape([PAGE])
                acc = warpgroup_mma_wait(0, deps=(run,))
                mbarrier.arrive(k_free.index(stage), count=1)
                seen = (acc + gl.abs(acc)) * gl.expand_dims(half_w, 0)  # x + |x| is 2 max(x, 0) exactly
                total = gl.sum(seen.reshape([PAGE, TOKENS, H]), axis=2)
                total *= gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, layout)), 1)
                key = number * PAGE + offset
                gl.store(target + key, total, mask=key < end)
            mbarrier.arrive(q_free.index(slot), count=1)
            turn += 1
            tile += stop - page
        row += 1
        page = 0


@gluon.jit
def _paged_mqa_logits_hopper_kernel(
    q_desc, k_desc, s_desc, weights, seq_lens, block_tables, schedule, out,
    num_tokens, max_keys, page_lines, table_stride, out_stride,
    H: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [NUM_Q, TOKENS * H, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [NUM_K, PAGE, D], k_desc.layout)
    s_bufs = gl.allocate_shared_memory(s_desc.dtype, [NUM_K, 2, 32], s_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [NUM_Q, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [NUM_Q, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [NUM_K, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_K, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_Q):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)  # both scorers
    for i in gl.static_range(NUM_K):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=1)  # the one scorer of the page
    start = schedule + gl.program_id(0) * 2
    first = (gl.load(start), gl.load(start + 1))
    work = (seq_lens, num_tokens, max_keys, gl.load(start + 2), gl.load(start + 3), gl.program_id(1))
    buffers = (q_bufs, k_bufs, s_bufs, q_ready, q_free, k_ready, k_free)
    tensors = (weights, out, out_stride)
    gl.warp_specialize(
        [
            (_score_partition, (tensors, first, work, buffers, H, TOKENS, 0)),
            (_score_partition, (tensors, first, work, buffers, H, TOKENS, 1)),
            (
                _load_partition,
                ((q_desc, k_desc, s_desc), first, work, (block_tables, table_stride, page_lines), buffers, H, TOKENS),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def paged_mqa_logits_hopper(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the logits; arguments as paged_mqa_logits checked them, none empty."""
    rows, num_tokens, H, _ = q.shape
    blocks, page_bytes = cache.shape[0], cache.stride(0)
    if page_bytes % LINE or cache.data_ptr() % 16:
        raise PlanError(
            f"pages {page_bytes} bytes apart at address {cache.data_ptr():#x}: TMA wants pages of whole lines of "
            f"{LINE} bytes that start at multiples of 16; allocate the cache so"
        )
    lines = cache.as_strided((blocks * page_bytes // LINE, LINE), (LINE, 1))
    tile = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    tokens = tokens_at_once(H, num_tokens)
    columns = q.view(rows * num_tokens * H, D.value)
    _paged_mqa_logits_hopper_kernel[(schedule.shape[0] - 1, triton.cdiv(num_tokens, tokens))](
        TensorDescriptor.from_tensor(columns, [tokens * H, D.value], tile),
        TensorDescriptor.from_tensor(lines.view(torch.float8_e4m3fn), [PAGE.value, D.value], tile),
        TensorDescriptor.from_tensor(lines.view(torch.float32), [2, LINE // 4], flat),
        weights, seq_lens, block_tables, schedule, out,
        num_tokens, out.shape[1], page_bytes // LINE, block_tables.stride(0), out.stride(0),
        H=H, TOKENS=tokens, num_warps=4, maxnreg=168,
    )  # fmt: skip


def tokens_at_once(num_heads: int, num_tokens: int) -> int:
    """Query tokens of a row that share a pass over its pages: a power of two, up to 256 columns (token, head)."""
    return int(min(triton.next_power_of_2(num_tokens), 256 // num_heads))
