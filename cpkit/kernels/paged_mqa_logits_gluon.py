"""The decode logits of paged_mqa_logits.py on Hopper: pages stream in while groups of warps score.

A decode step reads every key once: 8,448 bytes a page against 128 multiply-adds a key, query token and head. So a
program keeps pages under way and never lets the memory wait for the arithmetic:

    loader     block table -> TMA: the row's queries once, then pages, twelve ahead: 64 keys and their 64 scales
               (a lane reads one entry of the table: 32 pages' blocks at once, the next 32 and the next row's early)
    scorer 0   page 0: wgmma | sum over heads, store |      page 3 ...
    scorer 1           page 1: wgmma | sum over heads, store |      page 4 ...
    scorer 2                   page 2: wgmma | sum over heads, store |      page 5 ...

A scorer gives a page's place back to the loader as soon as its product is there: sums live in registers. Where a row's
query tokens fill more than 128 columns (token, head), two scorers with more registers take them in two products, sum
the first while the second runs, and keep the page to the end, which is two per cent faster there. Keys are the tall
side, so the sum over heads stays within a quad of lanes (head_sums_gluon.py). A page is 66 lines of 128 bytes: 64 of
values, 2 of scales; both are boxes of one matrix of lines. A block outside the cache lies outside the matrix, and TMA
fills such boxes with zeros.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cpkit.errors import PlanError
from cpkit.kernels.head_sums_gluon import owner_layout, weighted_head_sums

D = gl.constexpr(128)
PAGE = gl.constexpr(64)  # keys of a page
LINE = 128  # bytes
NUM_Q = gl.constexpr(2)  # rows whose queries are in shared memory: the next one's load while this one is scored
NUM_K = gl.constexpr(12)  # pages in shared memory; with 18, decodes of one query token took 3 % longer on an H200
LANES = gl.constexpr(32)  # of the loader's warp
NO_BLOCK = gl.constexpr(-(2**31))  # less than any entry of a block table

_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name in newer Triton; in 3.6


@gluon.jit
def _row_ends(row, live, work, TOKENS: gl.constexpr):
    """Where the keys of a row's query tokens end, of those that this program scores; 0 for a row that is not live."""
    seq_lens, num_tokens, _, _, _, group = work
    token = group * TOKENS + gl.arange(0, TOKENS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.load(seq_lens + row * num_tokens + token, mask=(token < num_tokens) & live, other=0)


@gluon.jit
def _row_stop(ends, row, page, work):
    """Of one row of the schedule, from `page` on: the page behind the last that this program reads."""
    _, _, max_keys, last_row, last_page, _ = work
    pages = gl.cdiv(gl.minimum(gl.max(ends, axis=0), max_keys), PAGE)
    return gl.maximum(page, gl.where(row == last_row, gl.minimum(pages, last_page), pages))


@gluon.jit
def _table_blocks(table, page, live, work):
    """A lane's block of the LANES pages from `page` on; -1 behind the row's table and for a row that is not live."""
    _, _, max_keys, _, _, _ = work
    number = page + gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return gl.load(table + number, mask=live & (number < gl.cdiv(max_keys, PAGE)), other=-1)


@gluon.jit
def _load_partition(descs, first, work, tables, buffers, H: gl.constexpr, TOKENS: gl.constexpr):
    """But for a program's first row, what comes from memory is asked for early: a row ahead, or 32 pages."""
    q_desc, k_desc, s_desc = descs
    block_tables, table_stride, page_lines = tables
    q_bufs, k_bufs, s_bufs, q_ready, q_free, k_ready, k_free = buffers
    row, page = first
    _, num_tokens, _, last_row, last_page, group = work
    COLS: gl.constexpr = min(TOKENS * H, 128)
    SPLIT: gl.constexpr = TOKENS * H // COLS
    lane = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    turn = 0
    stage = 0
    phase = 1
    live = (row < last_row) | ((row == last_row) & (page < last_page))
    table = block_tables + row.to(gl.int64) * table_stride
    blocks = _table_blocks(table, page, live, work)
    ends = _row_ends(row, live, work, TOKENS)
    while live:
        next_live = (row + 1 < last_row) | ((row + 1 == last_row) & (last_page > 0))
        next_blocks = _table_blocks(table + table_stride, 0, next_live, work)
        next_ends = _row_ends(row + 1, next_live, work, TOKENS)
        stop = _row_stop(ends, row, page, work)
        if page < stop:
            slot = turn % NUM_Q
            mbarrier.wait(q_free.index(slot), (turn // NUM_Q & 1) ^ 1)
            mbarrier.expect(q_ready.index(slot), TOKENS * H * D)
            column = (row * num_tokens + group * TOKENS) * H
            for part in gl.static_range(SPLIT):
                target = q_bufs.index(slot * SPLIT + part)
                _tma_load(q_desc, [column + part * COLS, 0], q_ready.index(slot), target)
            turn += 1
            for start in range(page, stop, LANES):
                ahead = _table_blocks(table, start + LANES, True, work)
                for i in range(gl.minimum(stop - start, LANES)):
                    line = gl.max(gl.where(lane == i, blocks, NO_BLOCK), axis=0) * page_lines
                    mbarrier.wait(k_free.index(stage), phase)
                    mbarrier.expect(k_ready.index(stage), PAGE * (D + 4))
                    _tma_load(k_desc, [line, 0], k_ready.index(stage), k_bufs.index(stage))
                    _tma_load(s_desc, [line + PAGE, 0], k_ready.index(stage), s_bufs.index(stage))
                    stage += 1
                    phase = gl.where(stage == NUM_K, phase ^ 1, phase)
                    stage = gl.where(stage == NUM_K, 0, stage)
                blocks = ahead
        row += 1
        page = 0
        table += table_stride
        live = next_live
        blocks = next_blocks
        ends = next_ends


@gluon.jit
def _page_scales(scales, TOKENS: gl.constexpr):
    """Scales of a page's keys, each where the sums of its key are."""
    return scales.reshape([PAGE]).load(gl.SliceLayout(1, gl.SliceLayout(2, owner_layout(TOKENS))))


@gluon.jit
def _store_logits(sums, scales, number, rows):
    """The logits of one page for the tokens of one product; rows: their last keys and their lines of the output."""
    end, target = rows
    key = gl.expand_dims(number * PAGE + gl.arange(0, PAGE, layout=gl.SliceLayout(1, sums.type.layout)), 1)
    logits = sums * gl.expand_dims(scales, 1)
    gl.store(gl.expand_dims(target, 0) + key, logits, mask=key < gl.expand_dims(end, 0))


@gluon.jit
def _token_inputs(row, token, stop, tensors, work, H: gl.constexpr, COLS: gl.constexpr):
    """Of the tokens of one product, from `token` on: half weights by column; the last keys and lines of the output."""
    weights, out, out_stride = tensors
    seq_lens, num_tokens, max_keys, _, _, _ = work
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, mma))
    col_token = token + cols // H
    place = row.to(gl.int64) * num_tokens + col_token
    half_weights = gl.load(weights + place * H + cols % H, mask=col_token < num_tokens, other=0.0) * 0.5
    owner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, owner_layout(COLS // H)))
    own = token + gl.arange(0, COLS // H, layout=owner)
    line = row.to(gl.int64) * num_tokens + own
    end = gl.load(seq_lens + line, mask=own < num_tokens, other=0)
    end = gl.minimum(gl.minimum(end, max_keys), stop * PAGE)  # behind stop: pages of other programs
    return half_weights, (end, out + line * out_stride)


@gluon.jit
def _score_partition(
    tensors, first, work, buffers, H: gl.constexpr, TOKENS: gl.constexpr, SCORER: gl.constexpr, SCORERS: gl.constexpr
):  # fmt: skip
    q_bufs, k_bufs, s_bufs, q_ready, q_free, k_ready, k_free = buffers
    row, page = first
    _, _, _, last_row, last_page, group = work
    COLS: gl.constexpr = min(TOKENS * H, 128)
    SPLIT: gl.constexpr = TOKENS * H // COLS
    PART: gl.constexpr = COLS // H  # query tokens of one product
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    turn = 0
    tile = 0
    while (row < last_row) | ((row == last_row) & (page < last_page)):
        stop = _row_stop(_row_ends(row, True, work, TOKENS), row, page, work)
        if page < stop:
            token = group * TOKENS
            w0, rows0 = _token_inputs(row, token, stop, tensors, work, H, COLS)
            slot = turn % NUM_Q
            mbarrier.wait(q_ready.index(slot), turn // NUM_Q & 1)
            q0 = q_bufs.index(slot * SPLIT).permute((1, 0))
            acc0 = gl.zeros([PAGE, COLS], gl.float32, mma)
            if SPLIT == 2:
                w1, rows1 = _token_inputs(row, token + PART, stop, tensors, work, H, COLS)
                q1 = q_bufs.index(slot * SPLIT + 1).permute((1, 0))
                acc1 = gl.zeros([PAGE, COLS], gl.float32, mma)
            # Scorers take pages in turn over all rows: a row's first page belongs to whoever is next.
            for number in range(page + (SCORER + SCORERS - tile % SCORERS) % SCORERS, stop, SCORERS):
                at = tile + number - page
                stage = at % NUM_K
                mbarrier.wait(k_ready.index(stage), at // NUM_K & 1)
                run0 = warpgroup_mma(k_bufs.index(stage), q0, acc0, use_acc=False, is_async=True)
                if SPLIT == 1:
                    scales = _page_scales(s_bufs.index(stage), PART)
                    acc0 = warpgroup_mma_wait(0, deps=(run0,))
                    mbarrier.arrive(k_free.index(stage), count=1)
                    _store_logits(weighted_head_sums(acc0, w0, H, CHAINS_FIRST=False), scales, number, rows0)
                else:
                    run1 = warpgroup_mma(k_bufs.index(stage), q1, acc1, use_acc=False, is_async=True)
                    acc0 = warpgroup_mma_wait(1, deps=(run0,))
                    sums0 = weighted_head_sums(acc0, w0, H, CHAINS_FIRST=False)
                    _store_logits(sums0, _page_scales(s_bufs.index(stage), PART), number, rows0)
                    # Nothing of run1 may cross into the next turn of the loop: ptxas would wait after every wgmma.
                    acc1 = warpgroup_mma_wait(0, deps=(run1,))
                    sums1 = weighted_head_sums(acc1, w1, H, CHAINS_FIRST=False)
                    _store_logits(sums1, _page_scales(s_bufs.index(stage), PART), number, rows1)
                    mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.arrive(q_free.index(slot), count=1)
            turn += 1
            tile += stop - page
        row += 1
        page = 0


@gluon.jit(
    do_not_specialize=[
        "seq_lens", "block_tables", "schedule", "out", "num_tokens", "max_keys", "page_lines",
        "table_stride", "out_stride",
    ]
)  # fmt: skip
def _paged_mqa_logits_hopper_kernel(
    q_desc, k_desc, s_desc, weights, seq_lens, block_tables, schedule, out, num_tokens: gl.int32,
    max_keys: gl.int32, page_lines: gl.int32, table_stride: gl.int64, out_stride: gl.int64,
    H: gl.constexpr, TOKENS: gl.constexpr, SCORERS: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = min(TOKENS * H, 128)
    # Read first, so that they are on their way while the barriers below are made ready, one after the other.
    start = schedule + gl.program_id(0) * 2
    first = (gl.load(start), gl.load(start + 1))
    last = (gl.load(start + 2), gl.load(start + 3))
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [NUM_Q * TOKENS * H // COLS, COLS, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [NUM_K, PAGE, D], k_desc.layout)
    s_bufs = gl.allocate_shared_memory(s_desc.dtype, [NUM_K, 2, 32], s_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [NUM_Q, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [NUM_Q, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [NUM_K, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_K, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_Q):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=SCORERS)
    for i in gl.static_range(NUM_K):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=1)  # the one scorer of the page
    work = (seq_lens, num_tokens, max_keys, last[0], last[1], gl.program_id(1))
    buffers = (q_bufs, k_bufs, s_bufs, q_ready, q_free, k_ready, k_free)
    tensors = (weights, out, out_stride)
    descs = (q_desc, k_desc, s_desc)
    tables = (block_tables, table_stride, page_lines)
    if SCORERS == 2:
        gl.warp_specialize(
            [
                (_score_partition, (tensors, first, work, buffers, H, TOKENS, 0, 2)),
                (_score_partition, (tensors, first, work, buffers, H, TOKENS, 1, 2)),
                (_load_partition, (descs, first, work, tables, buffers, H, TOKENS)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_score_partition, (tensors, first, work, buffers, H, TOKENS, 0, 3)),
                (_score_partition, (tensors, first, work, buffers, H, TOKENS, 1, 3)),
                (_score_partition, (tensors, first, work, buffers, H, TOKENS, 2, 3)),
                (_load_partition, (descs, first, work, tables, buffers, H, TOKENS)),
            ],
            [4, 4, 1],
            [152, 152, 40],
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
        TensorDescriptor.from_tensor(columns, [min(tokens * H, 128), D.value], tile),
        TensorDescriptor.from_tensor(lines.view(torch.float8_e4m3fn), [PAGE.value, D.value], tile),
        TensorDescriptor.from_tensor(lines.view(torch.float32), [2, LINE // 4], flat),
        weights, seq_lens, block_tables, schedule, out,
        num_tokens, out.shape[1], page_bytes // LINE, block_tables.stride(0), out.stride(0),
        H=H, TOKENS=tokens, **scorers(H, tokens), num_warps=4,
    )  # fmt: skip


def tokens_at_once(num_heads: int, num_tokens: int) -> int:
    """Query tokens of a row that share a pass over its pages: a power of two, up to 256 columns (token, head)."""
    return int(min(triton.next_power_of_2(num_tokens), 256 // num_heads))


def scorers(num_heads: int, tokens: int) -> dict[str, int]:
    """How many groups of warps score, and the registers of a thread at launch, which share out the whole file.

    Three groups hide the latency of a product better than two (2 query tokens: 311 us against 356 on an H200), four
    have too few registers (400 us).
    """
    return {"SCORERS": 3, "maxnreg": 128} if tokens * num_heads <= 128 else {"SCORERS": 2, "maxnreg": 168}
