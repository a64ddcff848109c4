"""The decode logits of paged_mqa_logits.py on Hopper: pages stream in while groups of warps score.

A decode step reads every key once: 8,448 bytes a page against 128 multiply-adds a key, query token and head. So a
program keeps pages under way and never lets the memory wait for the arithmetic:

    loader     block table -> TMA: a row's queries and weights, then pages, twelve ahead: 64 keys and their 64 scales
               (and which rows and pages these are: scorers learn all from shared memory, paged_mqa_loader_gluon.py)
    scorer 0   page 0: wgmma | sum over heads, store |      page 3 ...
    scorer 1           page 1: wgmma | sum over heads, store |      page 4 ...
    scorer 2                   page 2: wgmma | sum over heads, store |      page 5 ...

A scorer gives a page's place back to the loader as soon as its product is there: sums live in registers. Where a row's
query tokens fill more than 128 columns (token, head), two scorers with more registers take them in two products, sum
the first while the second runs, and keep the page to the end, which is two per cent faster there. Keys are the tall
side, so the sum over heads stays within a quad of lanes (head_sums_gluon.py). A page is 66 lines of 128 bytes: 64 of
values, 2 of scales; both are boxes of one matrix of lines. For a block outside the cache boxes before the matrix are
asked for, which TMA fills with zeros.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cpkit.errors import PlanError
from cpkit.kernels.head_sums_gluon import owner_layout, weighted_head_sums
from cpkit.kernels.paged_mqa_loader_gluon import (
    NUM_K,
    PAGE,
    TOLD,
    WORDS,
    D,
    load_partition,
    num_stretches,
    product_columns,
    what_is_told,
)

LINE = 128  # bytes


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
def _token_inputs(
    slot, part, stretch, target, work, stretches, H: gl.constexpr, COLS: gl.constexpr, SPLIT: gl.constexpr
):
    """Of the tokens of one product: half weights by column; the last keys and lines of the output."""
    row, _, stop = stretch
    out, out_stride = target
    _, num_tokens, max_keys, group = work
    _, w_bufs, _, ends_at, _, _ = stretches
    PART: gl.constexpr = COLS // H
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    half_weights = w_bufs.index(slot * SPLIT + part).reshape([COLS]).load(gl.SliceLayout(0, mma)) * 0.5
    owner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, owner_layout(PART)))
    own = group * (PART * SPLIT) + part * PART + gl.arange(0, PART, layout=owner)
    end = ends_at.index(slot).slice(part * PART, PART).load(owner)
    end = gl.minimum(gl.minimum(end, max_keys), stop * PAGE)  # behind stop: pages of other programs
    return half_weights, (end, out + (row.to(gl.int64) * num_tokens + own) * out_stride)


@gluon.jit
def _score_partition(
    target, work, stretches, pages, H: gl.constexpr, TOKENS: gl.constexpr, SCORER: gl.constexpr, SCORERS: gl.constexpr
):  # fmt: skip
    q_bufs, _, _, _, _, q_free = stretches
    k_bufs, s_bufs, k_ready, k_free = pages
    COLS: gl.constexpr = product_columns(TOKENS, H)
    SPLIT: gl.constexpr = TOKENS * H // COLS
    PART: gl.constexpr = COLS // H  # query tokens of one product
    SLOTS: gl.constexpr = num_stretches(TOKENS, H)
    LAST: gl.constexpr = NUM_K - SCORERS + SCORER  # a scorer's own places in the ring: SCORER, SCORER + SCORERS, ...
    gl.static_assert(NUM_K % SCORERS == 0)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    turn = 0
    tile = 0
    stage = SCORER
    phase = 0
    row, page, stop = what_is_told(turn, stretches, SLOTS)
    while row >= 0:
        slot = turn % SLOTS
        stretch = (row, page, stop)
        w0, rows0 = _token_inputs(slot, 0, stretch, target, work, stretches, H, COLS, SPLIT)
        q0 = q_bufs.index(slot * SPLIT).permute((1, 0))
        acc0 = gl.zeros([PAGE, COLS], gl.float32, mma)
        if SPLIT == 2:
            w1, rows1 = _token_inputs(slot, 1, stretch, target, work, stretches, H, COLS, SPLIT)
            q1 = q_bufs.index(slot * SPLIT + 1).permute((1, 0))
            acc1 = gl.zeros([PAGE, COLS], gl.float32, mma)
        # Scorers take pages in turn over all rows: a row's first page belongs to whoever is next.
        for number in range(page + (SCORER + SCORERS - tile % SCORERS) % SCORERS, stop, SCORERS):
            mbarrier.wait(k_ready.index(stage), phase)
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
            phase = gl.where(stage == LAST, phase ^ 1, phase)
            stage = gl.where(stage == LAST, SCORER, stage + SCORERS)
        mbarrier.arrive(q_free.index(slot), count=1)
        turn += 1
        tile += stop - page
        row, page, stop = what_is_told(turn, stretches, SLOTS)


@gluon.jit(
    do_not_specialize=[
        "seq_lens", "block_tables", "schedule", "out", "num_tokens", "max_keys", "page_lines", "num_blocks",
        "table_stride", "out_stride",
    ]
)  # fmt: skip
def _paged_mqa_logits_hopper_kernel(
    q_desc, w_desc, k_desc, s_desc, seq_lens, block_tables, schedule, out, num_tokens: gl.int32,
    max_keys: gl.int32, page_lines: gl.int32, num_blocks: gl.int32, table_stride: gl.int64, out_stride: gl.int64,
    H: gl.constexpr, TOKENS: gl.constexpr, SCORERS: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = product_columns(TOKENS, H)
    SLOTS: gl.constexpr = num_stretches(TOKENS, H)
    PRODUCTS: gl.constexpr = SLOTS * TOKENS * H // COLS
    # Read first, so that they are on their way while the barriers below are made ready, one after the other.
    start = schedule + gl.program_id(0) * 2
    share = (gl.load(start), gl.load(start + 1), gl.load(start + 2), gl.load(start + 3))
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [PRODUCTS, COLS, D], q_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [PRODUCTS, COLS // WORDS, WORDS], w_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [NUM_K, PAGE, D], k_desc.layout)
    s_bufs = gl.allocate_shared_memory(s_desc.dtype, [NUM_K, 2, WORDS], s_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    told = gl.allocate_shared_memory(gl.int32, [SLOTS, TOLD], plain)
    ends_at = gl.allocate_shared_memory(gl.int32, [SLOTS, TOKENS], plain)
    q_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [NUM_K, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_K, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=SCORERS)
    for i in gl.static_range(NUM_K):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=1)  # the one scorer of the page
    work = (seq_lens, num_tokens, max_keys, gl.program_id(1))
    stretches = (q_bufs, w_bufs, told, ends_at, q_ready, q_free)
    pages = (k_bufs, s_bufs, k_ready, k_free)
    target = (out, out_stride)
    descs = (q_desc, w_desc, k_desc, s_desc)
    tables = (block_tables, table_stride, page_lines, num_blocks)
    if SCORERS == 2:
        gl.warp_specialize(
            [
                (_score_partition, (target, work, stretches, pages, H, TOKENS, 0, 2)),
                (_score_partition, (target, work, stretches, pages, H, TOKENS, 1, 2)),
                (load_partition, (descs, share, work, tables, stretches, pages, H, TOKENS)),
            ],
            [4, 1],
            [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (_score_partition, (target, work, stretches, pages, H, TOKENS, 0, 3)),
                (_score_partition, (target, work, stretches, pages, H, TOKENS, 1, 3)),
                (_score_partition, (target, work, stretches, pages, H, TOKENS, 2, 3)),
                (load_partition, (descs, share, work, tables, stretches, pages, H, TOKENS)),
            ],
            [4, 4, 1],
            [152, 152, 56],
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
    _, num_tokens, H, _ = q.shape
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
    columns, words = product_columns(tokens, H), WORDS.value
    _paged_mqa_logits_hopper_kernel[(schedule.shape[0] - 1, triton.cdiv(num_tokens, tokens))](
        TensorDescriptor.from_tensor(q.view(-1, D.value), [columns, D.value], tile),
        TensorDescriptor.from_tensor(weights.view(-1, words), [columns // words, words], flat),
        TensorDescriptor.from_tensor(lines.view(torch.float8_e4m3fn), [PAGE.value, D.value], tile),
        TensorDescriptor.from_tensor(lines.view(torch.float32), [2, words], flat),
        seq_lens, block_tables, schedule, out,
        num_tokens, out.shape[1], page_bytes // LINE, blocks, block_tables.stride(0), out.stride(0),
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
