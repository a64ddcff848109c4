"""The indexer logits of mqa_logits.py on Hopper: tensor cores and CUDA cores at work at the same time.

Per (query token, key) and head the tensor cores do 128 multiply-adds; then the CUDA cores must take ReLU, weigh and
add, which costs half as long again if one waits for the other. So a program is three kinds of warps on one
multiprocessor:

    loader     TMA: the query block once per item, then keys, six tiles ahead
    scorer 0   wgmma rows 0 1   | reduce rows 0 1, while wgmma rows 2 3 runs   | reduce rows 2 3 |
    scorer 1                    the same with rows 4 5 and 6 7, half a tile later: its wgmma runs in scorer 0's gaps

(H = 64: 128 columns (row, head) are 2 rows; H = 32: 4 rows.) Keys are the tall side of the product, so all heads of a
(row, key) lie in one quad of lanes, and their sum stays in its registers (head_sums_gluon.py).

Which program does which rows and keys, in what order: mqa_items_gluon.py. Where only the logits that pass a bound are
wanted, the same kernel lists these: mqa_survivors_gluon.py.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cpkit.kernels.head_sums_gluon import owner_layout, weighted_head_sums
from cpkit.kernels.mqa_items_gluon import TILE, block_and_chunk, choose_chunk, item_of_lap
from cpkit.kernels.mqa_operands import Operands
from cpkit.kernels.mqa_survivors_gluon import claim_places, list_passing

D = gl.constexpr(128)
COLS = gl.constexpr(128)  # (row, head) columns of one wgmma
BLOCK_N = gl.constexpr(TILE)  # keys of one wgmma
GROUPS = gl.constexpr(4)  # column groups of a query block: two for each scorer
NUM_Q = gl.constexpr(2)  # query blocks in shared memory: the next one loads while this one is scored
NUM_K = gl.constexpr(6)  # key tiles in shared memory

_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name in newer Triton; in 3.6


@gluon.jit
def _write(logits, keys, group):
    """Write the logits of a tile and column group that lie in the rows' ranges."""
    _, start, end, out = group
    allowed = (keys >= gl.expand_dims(start, 0)) & (keys < gl.expand_dims(end, 0))
    gl.store(gl.expand_dims(out, 0) + keys, logits, mask=allowed)


@gluon.jit
def _item(item, work, H: gl.constexpr):
    """First query row of an item and the keys of its chunk that any of its rows may score; (row, n, n) if none."""
    key_start, key_end, M, N, num_blocks, _, chunk_keys = work
    ROWS: gl.constexpr = GROUPS * COLS // H
    block, chunk = block_and_chunk(item, num_blocks)
    row = block * ROWS
    chunk_start = chunk * chunk_keys
    rows = row + gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    start = gl.maximum(gl.load(key_start + rows, mask=rows < M, other=N), 0)
    end = gl.minimum(gl.load(key_end + rows, mask=rows < M, other=0), N)
    first = gl.maximum(gl.min(gl.where(start < end, start, N), axis=0), chunk_start)
    last = gl.minimum(gl.max(end, axis=0), chunk_start + chunk_keys)
    return row, first, gl.maximum(first, last)


@gluon.jit
def _load_partition(q_desc, k_desc, work, buffers, H: gl.constexpr):
    q_bufs, k_bufs, q_ready, q_free, k_ready, k_free = buffers
    num_items = work[5]
    turn = 0
    tile = 0
    for lap in range(gl.cdiv(num_items, gl.num_programs(0))):
        row, first, last = _item(item_of_lap(lap, gl.program_id(0), gl.num_programs(0)), work, H)
        if first < last:
            slot = turn % NUM_Q
            mbarrier.wait(q_free.index(slot), (turn // NUM_Q & 1) ^ 1)
            mbarrier.expect(q_ready.index(slot), GROUPS * COLS * D)
            for group in gl.static_range(GROUPS):
                column = row * H + group * COLS
                _tma_load(q_desc, [column, 0], q_ready.index(slot), q_bufs.index(slot * GROUPS + group))
            turn += 1
            for key in range(first, last, BLOCK_N):
                stage = tile % NUM_K
                mbarrier.wait(k_free.index(stage), (tile // NUM_K & 1) ^ 1)
                mbarrier.expect(k_ready.index(stage), BLOCK_N * D)
                _tma_load(k_desc, [key, 0], k_ready.index(stage), k_bufs.index(stage))
                tile += 1


@gluon.jit
def _group_inputs(rows, weight_rows, heads, span, tensors, work, sink, LIST: gl.constexpr):
    """Of one column group: its weights by column, halved; its rows, their ranges within the item's keys, and their
    bounds, (score, last key), or where their logits go.
    """
    _, weights, w_stride = tensors
    key_start, key_end, M, _, _, _, _ = work
    w = gl.load(weights + weight_rows.to(gl.int64) * w_stride + heads, mask=weight_rows < M, other=0.0) * 0.5
    start = gl.maximum(gl.load(key_start + rows, mask=rows < M, other=0), span[0])
    end = gl.minimum(gl.load(key_end + rows, mask=rows < M, other=0), span[1])
    if LIST:
        score = gl.load(sink[0] + rows, mask=rows < M, other=0.0)
        return w, (rows, start, end, score, gl.load(sink[1] + rows, mask=rows < M, other=0))
    else:
        return w, (rows, start, end, sink[0] + rows.to(gl.int64) * sink[1])


@gluon.jit
def _score_partition(tensors, work, sink, buffers, H: gl.constexpr, SCORER: gl.constexpr, LIST: gl.constexpr):
    q_bufs, _, q_ready, q_free, _, _ = buffers
    num_items = work[5]
    Q: gl.constexpr = COLS // H
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    own_rows = SCORER * 2 * Q + gl.arange(0, Q, layout=gl.SliceLayout(0, gl.SliceLayout(2, owner_layout(Q))))
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, mma))
    col_rows = SCORER * 2 * Q + cols // H
    heads = cols % H
    turn = 0
    tile = 0
    for lap in range(gl.cdiv(num_items, gl.num_programs(0))):
        row, first, last = _item(item_of_lap(lap, gl.program_id(0), gl.num_programs(0)), work, H)
        span = (first, last)
        w0, group0 = _group_inputs(row + own_rows, row + col_rows, heads, span, tensors, work, sink, LIST)
        w1, group1 = _group_inputs(row + Q + own_rows, row + Q + col_rows, heads, span, tensors, work, sink, LIST)
        if first < last:
            slot = turn % NUM_Q
            mbarrier.wait(q_ready.index(slot), turn // NUM_Q & 1)
            q0 = q_bufs.index(slot * GROUPS + SCORER * 2).permute((1, 0))
            q1 = q_bufs.index(slot * GROUPS + SCORER * 2 + 1).permute((1, 0))
            halves = ((q0, w0, group0), (q1, w1, group1))
            tile = _score_keys(halves, span, tile, tensors, work, sink, buffers, H, LIST)
            mbarrier.arrive(q_free.index(slot), count=1)
            turn += 1


@gluon.jit
def _score_keys(halves, span, tile, tensors, work, sink, buffers, H: gl.constexpr, LIST: gl.constexpr):
    """A scorer's two column groups of an item against its keys, from the tile that is next in shared memory.

    Returns the tile behind the last.
    """
    q0, w0, group0 = halves[0]
    q1, w1, group1 = halves[1]
    first, last = span
    _, k_bufs, _, _, k_ready, k_free = buffers
    k_scale = tensors[0]
    _, _, M, N, _, _, _ = work
    Q: gl.constexpr = COLS // H
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    owner: gl.constexpr = gl.SliceLayout(2, owner_layout(Q))
    # The order of a turn's instructions is ptxas's, and these two steer it. In trials on an H200 lists took 5 % longer
    # the other way with 64 heads and 10 to 15 % with 32, written logits 1 to 4 %.
    CHAINS_FIRST: gl.constexpr = LIST and H == 64
    SCALE_FIRST: gl.constexpr = not (LIST and H == 32)
    lanes = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, owner))
    acc0 = gl.zeros([BLOCK_N, COLS], gl.float32, mma)
    acc1 = gl.zeros([BLOCK_N, COLS], gl.float32, mma)
    if LIST:  # logits of a tile are counted and listed during the next one
        _, _, survivors, counts, room = sink
        none = gl.full([BLOCK_N, Q], float("nan"), gl.float32, owner)  # passes no bound
        found = (none, none)
    for key in range(first, last, BLOCK_N):
        stage = tile % NUM_K
        keys = gl.expand_dims(key + lanes, 1)
        if SCALE_FIRST:
            scale = gl.load(k_scale + key + lanes, mask=key + lanes < N, other=0.0)
        mbarrier.wait(k_ready.index(stage), tile // NUM_K & 1)
        run0 = warpgroup_mma(k_bufs.index(stage), q0, acc0, use_acc=False, is_async=True)
        if not SCALE_FIRST:
            scale = gl.load(k_scale + key + lanes, mask=key + lanes < N, other=0.0)
        run1 = warpgroup_mma(k_bufs.index(stage), q1, acc1, use_acc=False, is_async=True)
        if LIST:
            claimed = claim_places(found, keys - BLOCK_N, group0, group1, counts, M)
        acc0 = warpgroup_mma_wait(1, deps=(run0,))
        logits0 = weighted_head_sums(acc0, w0, H, CHAINS_FIRST) * gl.expand_dims(scale, 1)
        if LIST:
            list_passing(found, keys - BLOCK_N, claimed, group0, group1, survivors, room)
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
        last_tile = first + (gl.cdiv(last - first, BLOCK_N) - 1) * BLOCK_N
        keys = gl.expand_dims(last_tile + lanes, 1)
        claimed = claim_places(found, keys, group0, group1, counts, M)
        list_passing(found, keys, claimed, group0, group1, survivors, room)
    return tile


@gluon.jit
def _score(q_desc, k_desc, tensors, work, sink, H: gl.constexpr, LIST: gl.constexpr):
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
    buffers = (q_bufs, k_bufs, q_ready, q_free, k_ready, k_free)
    gl.warp_specialize(
        [
            (_score_partition, (tensors, work, sink, buffers, H, 0, LIST)),
            (_score_partition, (tensors, work, sink, buffers, H, 1, LIST)),
            (_load_partition, (q_desc, k_desc, work, buffers, H)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit(
    do_not_specialize=[
        "k_scale", "key_start", "key_end", "out", "M", "N", "w_lines", "out_stride", "num_items",
        "chunk_keys",
    ]
)  # fmt: skip
def _mqa_logits_hopper_kernel(
    q_desc, k_desc, k_scale, weights, key_start, key_end, out, M: gl.int32, N: gl.int32, w_lines: gl.int64,
    out_stride: gl.int64, num_items: gl.int32, chunk_keys: gl.int32, H: gl.constexpr,
):  # fmt: skip
    work = (key_start, key_end, M, N, gl.cdiv(M, GROUPS * COLS // H), num_items, chunk_keys)
    _score(q_desc, k_desc, (k_scale, weights, w_lines * 4), work, (out, out_stride), H, False)


@gluon.jit(
    do_not_specialize=[
        "k_scale", "key_start", "key_end", "bound_score", "bound_key", "survivors", "counts", "M", "N",
        "w_lines", "room", "num_items", "chunk_keys",
    ]
)  # fmt: skip
def _mqa_survivors_hopper_kernel(
    q_desc, k_desc, k_scale, weights, key_start, key_end, bound_score, bound_key, survivors, counts, M: gl.int32,
    N: gl.int32, w_lines: gl.int64, room: gl.int32, num_items: gl.int32, chunk_keys: gl.int32, H: gl.constexpr,
):  # fmt: skip
    work = (key_start, key_end, M, N, gl.cdiv(M, GROUPS * COLS // H), num_items, chunk_keys)
    sink = (bound_score, bound_key, survivors, counts, room)
    _score(q_desc, k_desc, (k_scale, weights, w_lines * 4), work, sink, H, True)


def mqa_logits_hopper(operands: Operands, out: torch.Tensor) -> None:
    """Write the logits; arguments as mqa_logits checked them, M and N at least 1."""
    _, _, *tensors = operands.all()
    grid, descriptors, sizes = _launch_of(operands, out.stride(0))
    _mqa_logits_hopper_kernel[grid](
        *descriptors, *tensors, out, *sizes, H=operands.q.shape[1], num_warps=4, maxnreg=168
    )


def mqa_survivors_hopper(
    operands: Operands, bounds: tuple[torch.Tensor, torch.Tensor], survivors: torch.Tensor, counts: torch.Tensor
) -> None:
    """List the logits that pass each row's bound instead of writing all: the same logits, bit for bit.

    bounds: score [M] fp32 and last key [M] int32. survivors: [M, room] int64 takes (score bits << 32 | key) in no
    order; counts: [M] int32, zeros before, says how many passed, also where they did not fit.
    """
    _, _, *tensors = operands.all()
    grid, descriptors, sizes = _launch_of(operands, survivors.stride(0))
    _mqa_survivors_hopper_kernel[grid](
        *descriptors, *tensors, *bounds, survivors, counts, *sizes, H=operands.q.shape[1], num_warps=4, maxnreg=168
    )


def _launch_of(
    operands: Operands, result_stride: int
) -> tuple[tuple[int], tuple[TensorDescriptor, ...], tuple[int, ...]]:
    """Grid, descriptors of q and k, and the sizes behind the tensors: M .. chunk_keys."""
    q, k = operands.q, operands.keys[0]
    M, H, N = q.shape[0], q.shape[1], operands.num_keys
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    q_desc = TensorDescriptor.from_tensor(q.reshape(M * H, D.value), [COLS.value, D.value], layout)
    k_desc = TensorDescriptor.from_tensor(k, [BLOCK_N.value, D.value], layout)
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    num_blocks = triton.cdiv(M * H, GROUPS.value * COLS.value)
    chunk_keys = choose_chunk(M, N, num_blocks, sms)
    num_items = num_blocks * triton.cdiv(N, chunk_keys)
    sizes = (M, N, operands.lines()[2], result_stride, num_items, chunk_keys)
    return (min(sms, num_items),), (q_desc, k_desc), sizes
