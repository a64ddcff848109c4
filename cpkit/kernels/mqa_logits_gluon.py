"""The indexer logits of mqa_logits.py on Hopper: tensor cores and CUDA cores at work at the same time.

Per (query token, key) and head the tensor cores do 128 multiply-adds; then the CUDA cores must take ReLU, weigh and
add, which costs half as long again if one waits for the other. So a program is three kinds of warps on one
multiprocessor:

    loader     TMA: the query block once per item, then keys, six tiles ahead
    scorer 0   wgmma rows 0 1   | reduce rows 0 1, while wgmma rows 2 3 runs   | reduce rows 2 3 |
    scorer 1                    the same with rows 4 5 and 6 7, half a tile later: its wgmma runs in scorer 0's gaps

(H = 64: 128 columns (row, head) are 2 rows; H = 32: 4 rows.) Keys are the tall side of the product, so all heads of a
(row, key) lie in one quad of lanes, and their sum stays in its registers (head_sums_gluon.py).

Which program does which rows and keys, in what order: mqa_items_gluon.py; the loader: mqa_loader_gluon.py. Where only
the logits that pass a bound are wanted, the same kernel lists these: mqa_survivors_gluon.py.
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cpkit.kernels.head_sums_gluon import owner_layout, weighted_head_sums
from cpkit.kernels.key_shards import KeyShards
from cpkit.kernels.mqa_items_gluon import choose_chunk
from cpkit.kernels.mqa_loader_gluon import (
    BLOCK_N,
    COLS,
    GROUPS,
    NUM_K,
    NUM_Q,
    TOLD,
    D,
    load_partition,
    operand_row,
    what_is_told,
)
from cpkit.kernels.mqa_operands import Operands
from cpkit.kernels.mqa_survivors_gluon import claim_places, end_of_run, list_passing, thresholds


@gluon.jit
def _write(logits, keys, group):
    """Write the logits of a tile and column group that lie in the rows' ranges."""
    start, end, out = group
    allowed = (keys >= gl.expand_dims(start, 0)) & (keys < gl.expand_dims(end, 0))
    gl.store(gl.expand_dims(out, 0) + keys, logits, mask=allowed)


@gluon.jit
def _group_inputs(own, weight_rows, heads, span, weights, rows, sink, LIST: gl.constexpr, OPEN: gl.constexpr):
    """Of one column group: its weights by column, halved; its rows, or their ranges and where their logits go."""
    weight_at = operand_row(weight_rows, rows, OPEN).to(gl.int64) * weights[1]
    w = gl.load(weights[0] + weight_at + heads, mask=weight_rows < rows[2], other=0.0) * 0.5
    if LIST:
        return w, own
    else:
        start, end = _ranges(own, span, rows, OPEN)
        return w, (start, end, sink[0] + own.to(gl.int64) * sink[1])


@gluon.jit
def _ranges(own, span, rows, OPEN: gl.constexpr):
    """Keys of the item that rows may score."""
    key_start, key_end, M = rows[0], rows[1], rows[2]
    at = operand_row(own, rows, OPEN)
    start = gl.maximum(gl.load(key_start + at, mask=own < M, other=0), span[0])
    return start, gl.minimum(gl.load(key_end + at, mask=own < M, other=0), span[1])


@gluon.jit
def _tests(own, span, rows, sink):
    """Of rows whose logits are listed: keys of the item that they may score, and their bounds (score, last key)."""
    start, end = _ranges(own, span, rows, False)
    score = gl.load(sink[0] + own, mask=own < rows[2], other=0.0)
    return start, end, score, gl.load(sink[1] + own, mask=own < rows[2], other=0)


@gluon.jit
def _score_partition(
    keys, weights, work, rows, sink, buffers, H: gl.constexpr, SCORER: gl.constexpr, LIST: gl.constexpr,
    OPEN: gl.constexpr, SHARDS: gl.constexpr,
):  # fmt: skip
    """One scorer: query block after query block, as it is told, until the row is -1."""
    q_bufs, _, _, _, q_ready, q_free, _, _ = buffers
    Q: gl.constexpr = COLS // H
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    own_rows = SCORER * 2 * Q + gl.arange(0, Q, layout=gl.SliceLayout(0, gl.SliceLayout(2, owner_layout(Q))))
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, mma))
    col_rows = SCORER * 2 * Q + cols // H
    heads = cols % H
    turn = 0
    tile = 0
    row = 0
    while row >= 0:
        slot = turn % NUM_Q
        mbarrier.wait(q_ready.index(slot), turn // NUM_Q & 1)
        row, first_tile, begin, stop = what_is_told(slot, buffers)
        if row >= 0:
            span = (begin, stop)
            w0, group0 = _group_inputs(row + own_rows, row + col_rows, heads, span, weights, rows, sink, LIST, OPEN)
            w1, group1 = _group_inputs(
                row + Q + own_rows, row + Q + col_rows, heads, span, weights, rows, sink, LIST, OPEN
            )
            q0 = q_bufs.index(slot * GROUPS + SCORER * 2).permute((1, 0))
            q1 = q_bufs.index(slot * GROUPS + SCORER * 2 + 1).permute((1, 0))
            halves = ((q0, w0, group0), (q1, w1, group1))
            if LIST:
                told = (first_tile, begin, stop)
                tile = _list_keys(halves, told, tile, keys, work, rows, sink, buffers, H, SHARDS)
            else:
                span = (first_tile, stop)
                tile = _score_keys(halves, span, tile, keys, work, sink, buffers, (), H, False, SHARDS)
            mbarrier.arrive(q_free.index(slot), count=1)
            turn += 1


@gluon.jit
def _list_keys(
    halves, told, tile, key_source, work, rows, sink, buffers, H: gl.constexpr, SHARDS: gl.constexpr,
):  # fmt: skip
    """A scorer's two column groups of an item against its keys where logits are listed: one run of tiles after another.

    Ranges and bounds are read again for each run, so that no register holds them through its turns. Returns the tile
    behind the last.
    """
    first, begin, stop = told
    span = (begin, stop)
    groups = (halves[0][2], halves[1][2])
    _, _, survivors, counts, room = sink
    Q: gl.constexpr = COLS // H
    owner: gl.constexpr = gl.SliceLayout(2, owner_layout(Q))
    lanes = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, owner))
    none = gl.full([BLOCK_N, Q], float("nan"), gl.float32, owner)  # reaches no bound
    while first < stop:
        tests0 = _tests(groups[0], span, rows, sink)
        tests1 = _tests(groups[1], span, rows, sink)
        end = end_of_run(first, stop, tests0, tests1)
        keys = gl.expand_dims(first + lanes, 1)
        reach = (thresholds(keys, tests0), thresholds(keys, tests1))
        lists = (reach, (none, none))
        tile, found = _score_keys(halves, (first, end), tile, key_source, work, sink, buffers, lists, H, True, SHARDS)
        keys = gl.expand_dims(end - 1 - (end - 1 - first) % BLOCK_N + lanes, 1)
        list_passing(found, keys, claim_places(found, reach, groups, counts), groups, survivors, room)
        first = end
    return tile


@gluon.jit
def _score_keys(
    halves, span, tile, key_source, work, sink, buffers, lists, H: gl.constexpr, LIST: gl.constexpr,
    SHARDS: gl.constexpr,
):  # fmt: skip
    """A scorer's two column groups of an item against keys, from the tile that is next in shared memory.

    lists: where logits are listed, what they must reach, and logits of a tile before the first. Returns the tile
    behind the last, and with LIST the last one's logits too, which are not listed yet.
    """
    q0, w0, group0 = halves[0]
    q1, w1, group1 = halves[1]
    first, last = span
    _, k_bufs, s_bufs, _, _, _, k_ready, k_free = buffers
    k_scale = key_source[0]
    N = work[0]
    Q: gl.constexpr = COLS // H
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    owner: gl.constexpr = gl.SliceLayout(2, owner_layout(Q))
    # The order of a turn's instructions is ptxas's, and these two steer it. In trials on an H200 lists took up to 5 %
    # longer with the first the other way, written logits of 64 heads 7 % longer, of 32 heads 2 % shorter. With both the
    # other way lists of 32 heads took 10 to 15 % longer, in trials of turns that spilled registers.
    CHAINS_FIRST: gl.constexpr = LIST
    SCALE_FIRST: gl.constexpr = not (LIST and H == 32) and not SHARDS
    lanes = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, owner))
    acc0 = gl.zeros([BLOCK_N, COLS], gl.float32, mma)
    acc1 = gl.zeros([BLOCK_N, COLS], gl.float32, mma)
    if LIST:  # logits of a tile are counted and listed during the next one
        _, _, survivors, counts, room = sink
        reach, found = lists
    for key in range(first, last, BLOCK_N):
        stage = tile % NUM_K
        keys = gl.expand_dims(key + lanes, 1)
        if SCALE_FIRST:
            scale = gl.load(k_scale + key + lanes, mask=key + lanes < N, other=0.0)
        mbarrier.wait(k_ready.index(stage), tile // NUM_K & 1)
        run0 = warpgroup_mma(k_bufs.index(stage), q0, acc0, use_acc=False, is_async=True)
        if not SCALE_FIRST and not SHARDS:
            scale = gl.load(k_scale + key + lanes, mask=key + lanes < N, other=0.0)
        run1 = warpgroup_mma(k_bufs.index(stage), q1, acc1, use_acc=False, is_async=True)
        if LIST:
            claimed = claim_places(found, reach, (group0, group1), counts)
        acc0 = warpgroup_mma_wait(1, deps=(run0,))
        if SHARDS:
            scale = s_bufs.index(stage).reshape([BLOCK_N]).load(gl.SliceLayout(1, owner))
        logits0 = weighted_head_sums(acc0, w0, H, CHAINS_FIRST) * gl.expand_dims(scale, 1)
        if LIST:
            list_passing(found, keys - BLOCK_N, claimed, (group0, group1), survivors, room)
        else:
            _write(logits0, keys, group0)
        # Nothing of run1 may cross into the next turn of the loop: ptxas would then wait after every wgmma.
        acc1 = warpgroup_mma_wait(0, deps=(run1,))
        mbarrier.arrive(k_free.index(stage), count=1)
        logits1 = weighted_head_sums(acc1, w1, H, CHAINS_FIRST) * gl.expand_dims(scale, 1)
        if LIST:
            found = (logits0, logits1)
        else:
            _write(logits1, keys, group1)
        tile += 1
    if LIST:
        return tile, found
    else:
        return tile


@gluon.jit
def _score(
    descs, keys, weights, work, rows, sink, H: gl.constexpr, LIST: gl.constexpr, OPEN: gl.constexpr,
    SHARDS: gl.constexpr,
):  # fmt: skip
    """weights: the tensor, and floats from row to row; sink: where results go; the others as the loader has them."""
    q_desc, k_desc, s_desc = descs
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [NUM_Q * GROUPS, COLS, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [NUM_K, BLOCK_N, D], k_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [NUM_Q, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [NUM_Q, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [NUM_K, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_K, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_Q):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)  # both scorers
    for i in gl.static_range(NUM_K):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
    told = gl.allocate_shared_memory(gl.int32, [NUM_Q, TOLD], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if SHARDS:
        s_bufs = gl.allocate_shared_memory(gl.float32, [NUM_K, 1, BLOCK_N], s_desc.layout)
    else:
        s_bufs = k_bufs  # scales are read where they are needed
    buffers = (q_bufs, k_bufs, s_bufs, told, q_ready, q_free, k_ready, k_free)
    gl.warp_specialize(
        [
            (_score_partition, (keys, weights, work, rows, sink, buffers, H, 0, LIST, OPEN, SHARDS)),
            (_score_partition, (keys, weights, work, rows, sink, buffers, H, 1, LIST, OPEN, SHARDS)),
            (load_partition, (descs, keys, work, rows, buffers, H, OPEN, SHARDS)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _rows(key_start, key_end, num_rows, open_rows, first_open, OPEN: gl.constexpr):
    """All query rows, or those of a list from its place first_open on, as many as there are."""
    if OPEN:
        num_open = gl.maximum(gl.load(open_rows) - first_open, 0)
        return (key_start, key_end, gl.minimum(num_open, num_rows), open_rows + 1 + first_open)
    else:
        return (key_start, key_end, num_rows)


@gluon.jit
def _keys(scales, shards, SHARDS: gl.constexpr):
    """Scales of keys in token order, or of shards."""
    if SHARDS:
        return (scales, shards)
    else:
        return (scales,)


_COMMON = [
    "k_scale", "key_start", "key_end", "local_start", "M", "N", "w_units", "num_items", "chunk_keys", "num_regions",
    "steps", "dcp_size", "interleave", "keys_per_rank",
]  # fmt: skip


@gluon.jit(do_not_specialize=["out", "open_rows", "out_stride", "first_open", *_COMMON])
def _mqa_logits_hopper_kernel(
    q_desc, k_desc, s_desc, k_scale, weights, key_start, key_end, out, open_rows, M: gl.int32, N: gl.int32,
    w_units: gl.int64, out_stride: gl.int64, num_items: gl.int32, chunk_keys: gl.int32, first_open: gl.int32,
    local_start, num_regions: gl.int32, steps: gl.int32, dcp_size: gl.int32, interleave: gl.int32,
    keys_per_rank: gl.int32, H: gl.constexpr, OPEN: gl.constexpr, SHARDS: gl.constexpr,
):  # fmt: skip
    """open_rows, first_open: where rows are listed (OPEN). local_start .. keys_per_rank: of shards (SHARDS)."""
    rows = _rows(key_start, key_end, M, open_rows, first_open, OPEN)
    num_blocks = gl.cdiv(rows[2], GROUPS * COLS // H)
    if OPEN:
        num_items = num_blocks * gl.cdiv(N, chunk_keys)
    work = (N, num_blocks, num_items, chunk_keys)
    keys = _keys(k_scale, (local_start, num_regions, steps, dcp_size, interleave, keys_per_rank), SHARDS)
    _score(
        (q_desc, k_desc, s_desc), keys, (weights, w_units * 4), work, rows, (out, out_stride), H, False, OPEN, SHARDS
    )


@gluon.jit(do_not_specialize=["bound_score", "bound_key", "survivors", "counts", "room", *_COMMON])
def _mqa_survivors_hopper_kernel(
    q_desc, k_desc, s_desc, k_scale, weights, key_start, key_end, bound_score, bound_key, survivors, counts,
    M: gl.int32, N: gl.int32, w_units: gl.int64, room: gl.int32, num_items: gl.int32, chunk_keys: gl.int32,
    local_start, num_regions: gl.int32, steps: gl.int32, dcp_size: gl.int32, interleave: gl.int32,
    keys_per_rank: gl.int32, H: gl.constexpr, SHARDS: gl.constexpr,
):  # fmt: skip
    """bound_score .. room: as mqa_survivors_hopper has them. local_start .. keys_per_rank: of shards (SHARDS)."""
    keys = _keys(k_scale, (local_start, num_regions, steps, dcp_size, interleave, keys_per_rank), SHARDS)
    work = (N, gl.cdiv(M, GROUPS * COLS // H), num_items, chunk_keys)
    rows = (key_start, key_end, M)
    sink = (bound_score, bound_key, survivors, counts, room)
    _score((q_desc, k_desc, s_desc), keys, (weights, w_units * 4), work, rows, sink, H, True, False, SHARDS)


def mqa_logits_hopper(operands: Operands, out: torch.Tensor) -> None:
    """Write the logits; arguments as mqa_logits checked them, M and N at least 1."""
    not_read = operands.key_start
    results = (out, not_read), out.stride(0)
    _launch(_mqa_logits_hopper_kernel, operands, len(operands.q), results, 0, box=COLS.value, OPEN=False)


def mqa_open_logits_hopper(operands: Operands, open_rows: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """Write the logits of rows that only the device knows: open_rows [1 + M] int32, their number and which they are.

    out: [rows, N] fp32; its row i takes the logits of row open_rows[1 + first + i], if there are so many.
    """
    H, most = operands.q.shape[1], min(len(out), len(operands.q))
    results = (out, open_rows), out.stride(0)
    _launch(_mqa_logits_hopper_kernel, operands, most, results, first, box=H, OPEN=True)


def mqa_survivors_hopper(
    operands: Operands, bounds: tuple[torch.Tensor, torch.Tensor], survivors: torch.Tensor, counts: torch.Tensor
) -> None:
    """List the logits that pass each row's bound instead of writing all: the same logits, bit for bit.

    bounds: score [M] fp32 and last key [M] int32. survivors: [M, room] int64 takes (score bits << 32 | key) in no
    order; counts: [M] int32, zeros before, says how many passed, also where they did not fit.
    """
    results = (*bounds, survivors, counts), survivors.stride(0)
    _launch(_mqa_survivors_hopper_kernel, operands, len(operands.q), results, box=COLS.value)


def _launch(
    kernel: Any,
    operands: Operands,
    num_rows: int,
    results: tuple[tuple[torch.Tensor, ...], int],
    *first: int,
    box: int,
    **constants: bool,
) -> None:
    """For num_rows query rows; box: columns (row, head) that are read at once; results: tensors, and their stride."""
    q, k, *tensors = operands.all()
    H, N = q.shape[1], operands.num_keys
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    q_desc = TensorDescriptor.from_tensor(q.reshape(-1, D.value), [box, D.value], layout)
    k_desc = TensorDescriptor.from_tensor(k, [BLOCK_N.value, D.value], layout)
    s_desc = k_desc  # in token order scorers read scales: any descriptor does
    if isinstance(operands.keys, KeyShards):
        words = tensors[0]
        flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        s_desc = TensorDescriptor(words, [1, len(words)], [-(-len(words) // 4) * 4, 1], [1, BLOCK_N.value], flat)
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    num_blocks = triton.cdiv(num_rows * H, GROUPS.value * COLS.value)
    chunk_keys = choose_chunk(num_rows, N, num_blocks, sms)
    num_items = num_blocks * triton.cdiv(N, chunk_keys)
    numbers = (num_rows, N, operands.row_units()[2], results[1], num_items, chunk_keys, *first)
    kernel[(min(sms, num_items),)](
        q_desc, k_desc, s_desc, *tensors, *results[0], *numbers, *operands.places(), H=H,
        SHARDS=isinstance(operands.keys, KeyShards), **constants, num_warps=4, maxnreg=168,
    )  # fmt: skip
