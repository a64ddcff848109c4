"""The warp that loads, of the Hopper kernel of a prefill's logits (mqa_logits_gluon.py), and what it tells the scorers.

It goes through the program's items (mqa_items_gluon.py) and finds which keys the rows of each may score. Queries and
keys come by TMA; with the queries scorers learn what they belong to, and last that there is nothing more:

    told      row of the block's first query, or -1 behind the last item
              first key of the first tile, first key that may be scored, key behind the last

Rows of the result are the query rows in their order, or those that a list on the device names: then each row's queries
are a box of their own. Keys lie in token order, or as DCP ranks sent them (mqa_shards_gluon.py): then an item is told
region by region, and scales come beside the keys. All warps share

    work       N, blocks of query rows, items, keys of an item's chunk
    rows       key_start, key_end, M, and the list of rows if there is one
    keys       their scales, and the shards if they lie so
    buffers    queries, keys, scales of shards, what is told; barriers of queries that are ready, or free again, and of
               keys
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from cpkit.kernels.mqa_items_gluon import TILE, block_and_chunk, item_of_lap
from cpkit.kernels.mqa_shards_gluon import (
    first_place,
    memory_of_tile,
    next_place,
    part_of_region,
    region_of,
    words_of_scales,
)
from cpkit.kernels.warp_scalars_gluon import uniform

D = gl.constexpr(128)
COLS = gl.constexpr(128)  # (row, head) columns of one wgmma
BLOCK_N = gl.constexpr(TILE)  # keys of one wgmma
GROUPS = gl.constexpr(4)  # column groups of a query block: two for each scorer
NUM_Q = gl.constexpr(2)  # query blocks in shared memory: the next one loads while this one is scored
NUM_K = gl.constexpr(6)  # key tiles in shared memory
TOLD = gl.constexpr(4)  # numbers that scorers are told

_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name in newer Triton; in 3.6
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def operand_row(row, rows, OPEN: gl.constexpr):
    """Row of the operands that a row of the result stands for: itself, or the one that is listed there."""
    if OPEN:
        return gl.load(rows[3] + row, mask=row < rows[2], other=0)
    else:
        return row


@gluon.jit
def keys_of_item(item, work, rows, H: gl.constexpr, OPEN: gl.constexpr):
    """First query row of an item and the keys of its chunk that any of its rows may score; (row, n, n) if none."""
    N, num_blocks, _, chunk_keys = work
    key_start, key_end, M = rows[0], rows[1], rows[2]
    ROWS: gl.constexpr = GROUPS * COLS // H
    block, chunk = block_and_chunk(item, num_blocks)
    row = block * ROWS
    chunk_start = chunk * chunk_keys
    own = row + gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    at = operand_row(own, rows, OPEN)
    start = gl.maximum(gl.load(key_start + at, mask=own < M, other=N), 0)
    end = gl.minimum(gl.load(key_end + at, mask=own < M, other=0), N)
    first = gl.maximum(gl.min(gl.where(start < end, start, N), axis=0), chunk_start)
    last = gl.minimum(gl.max(end, axis=0), chunk_start + chunk_keys)
    return row, uniform(first), uniform(gl.maximum(first, last))


@gluon.jit
def _tell(slot, row, first_tile, begin, stop, buffers):
    """Put down what scorers are told of a slot's queries; the queries' barrier lets them read it."""
    told = buffers[3]
    i = gl.arange(0, TOLD, layout=gl.BlockedLayout([1], [32], [1], [0]))
    numbers = gl.where(i == 0, row, gl.where(i == 1, first_tile, gl.where(i == 2, begin, stop)))
    told.index(slot).store(numbers)
    _barrier()


@gluon.jit
def what_is_told(slot, buffers):
    """The four numbers, once the slot's queries are ready."""
    told = buffers[3]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.arange(0, TOLD, layout=layout)
    numbers = told.index(slot).load(layout)
    row = uniform(gl.max(gl.where(i == 0, numbers, -1), axis=0))
    first_tile = uniform(gl.max(gl.where(i == 1, numbers, -1), axis=0))
    begin = uniform(gl.max(gl.where(i == 2, numbers, -1), axis=0))
    return row, first_tile, begin, uniform(gl.max(gl.where(i == 3, numbers, -1), axis=0))


@gluon.jit
def _begin(q_desc, row, span, rows, turn, buffers, H: gl.constexpr, OPEN: gl.constexpr):
    """Tell of a block of query rows and load it, column group after column group. span: first tile, begin, stop."""
    q_bufs, _, _, _, q_ready, q_free, _, _ = buffers
    Q: gl.constexpr = COLS // H
    slot = turn % NUM_Q
    mbarrier.wait(q_free.index(slot), (turn // NUM_Q & 1) ^ 1)
    _tell(slot, row, span[0], span[1], span[2], buffers)
    mbarrier.expect(q_ready.index(slot), GROUPS * COLS * D)
    for group in gl.static_range(GROUPS):
        target = q_bufs.index(slot * GROUPS + group)
        if OPEN:
            for i in gl.static_range(Q):
                at = operand_row(row + group * Q + i, rows, OPEN)
                _tma_load(q_desc, [at * H, 0], q_ready.index(slot), target.slice(i * H, H))
        else:
            _tma_load(q_desc, [row * H + group * COLS, 0], q_ready.index(slot), target)


@gluon.jit
def _load_ordered(k_desc, first, last, tile, buffers):
    """Keys that lie in token order. Returns the tile behind the last."""
    _, k_bufs, _, _, _, _, k_ready, k_free = buffers
    for key in range(first, last, BLOCK_N):
        stage = tile % NUM_K
        mbarrier.wait(k_free.index(stage), (tile // NUM_K & 1) ^ 1)
        mbarrier.expect(k_ready.index(stage), BLOCK_N * D)
        _tma_load(k_desc, [key, 0], k_ready.index(stage), k_bufs.index(stage))
        tile += 1
    return tile


@gluon.jit
def _load_shards(k_desc, s_desc, first, last, region, tile, keys, buffers):
    """Keys of a region as ranks sent them, and their scales. Returns the tile behind the last."""
    _, k_bufs, s_bufs, _, _, _, k_ready, k_free = buffers
    scales, shards = keys
    owner, local, into = first_place(first, region, shards)
    for _ in range(first, last, BLOCK_N):
        line, word, num_behind = memory_of_tile(owner, local, shards)
        stage = tile % NUM_K
        mbarrier.wait(k_free.index(stage), (tile // NUM_K & 1) ^ 1)
        if (local + BLOCK_N > num_behind) | (word % 4 != 0):
            _copy_scales(scales, word, local, num_behind, s_bufs.index(stage), shards)
            mbarrier.expect(k_ready.index(stage), BLOCK_N * D)
        else:
            mbarrier.expect(k_ready.index(stage), BLOCK_N * (D + 4))
            _tma_load(s_desc, [0, word], k_ready.index(stage), s_bufs.index(stage))
        _tma_load(k_desc, [line, 0], k_ready.index(stage), k_bufs.index(stage))
        tile += 1
        owner, local, into = next_place(owner, local, into, shards)
    return tile


@gluon.jit
def _copy_scales(scales, word, local, num_behind, target, shards):
    """Scales of a tile that lie in two pieces, or at no multiple of 16 bytes, by the warp itself."""
    lane = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([2], [32], [1], [0]))
    words, inside = words_of_scales(word, local, num_behind, lane, shards)
    target.reshape([BLOCK_N]).store(gl.load(scales + words, mask=inside, other=0.0))
    fence_async_shared()  # TMA writes there next
    _barrier()


@gluon.jit
def load_partition(descs, keys, work, rows, buffers, H: gl.constexpr, OPEN: gl.constexpr, SHARDS: gl.constexpr):
    """The loader: item after item, told and loaded, and at the end that there is none. descs: q, keys, their scales."""
    q_desc, k_desc, s_desc = descs
    _, _, _, _, q_ready, q_free, _, _ = buffers
    num_items = work[2]
    turn = 0
    tile = 0
    for lap in range(gl.cdiv(num_items, gl.num_programs(0))):
        row, first, last = keys_of_item(item_of_lap(lap, gl.program_id(0), gl.num_programs(0)), work, rows, H, OPEN)
        if SHARDS:
            shards = keys[1]
            region = region_of(first, shards)
            while (first < last) & (region < shards[1]):
                begin, stop, first_tile = part_of_region(region, first, last, shards)
                if begin < stop:
                    _begin(q_desc, row, (first_tile, begin, stop), rows, turn, buffers, H, OPEN)
                    turn += 1
                    tile = _load_shards(k_desc, s_desc, first_tile, stop, region, tile, keys, buffers)
                first = stop
                region += 1
        else:
            if first < last:
                _begin(q_desc, row, (first, first, last), rows, turn, buffers, H, OPEN)
                turn += 1
                tile = _load_ordered(k_desc, first, last, tile, buffers)
    slot = turn % NUM_Q
    mbarrier.wait(q_free.index(slot), (turn // NUM_Q & 1) ^ 1)
    _tell(slot, -1, 0, 0, 0, buffers)
    mbarrier.arrive(q_ready.index(slot), count=1)
