"""The warp that loads, of the Hopper kernel of a prefill's logits (mqa_logits_gluon.py): queries, then key tiles ahead.

Rows of the result are the query rows in their order, or those that a list on the device names: then each row's queries
are a box of their own. Keys lie in token order, or as DCP ranks sent them (mqa_shards_gluon.py). All warps share

    work       N, blocks of query rows, items, keys of an item's chunk
    rows       key_start, key_end, M, and the list of rows if there is one
    keys       their scales, and the shards if they lie so
    buffers    queries, keys, scales of shards; barriers of queries that are ready, or free again, and of keys
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from cpkit.kernels.mqa_items_gluon import TILE, block_and_chunk, item_of_lap
from cpkit.kernels.mqa_shards_gluon import part_of_region, place_of_tile, region_of

D = gl.constexpr(128)
COLS = gl.constexpr(128)  # (row, head) columns of one wgmma
BLOCK_N = gl.constexpr(TILE)  # keys of one wgmma
GROUPS = gl.constexpr(4)  # column groups of a query block: two for each scorer
NUM_Q = gl.constexpr(2)  # query blocks in shared memory: the next one loads while this one is scored
NUM_K = gl.constexpr(6)  # key tiles in shared memory

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
    return row, first, gl.maximum(first, last)


@gluon.jit
def _load_queries(q_desc, row, rows, slot, buffers, H: gl.constexpr, OPEN: gl.constexpr):
    """A block of query rows, column group after column group; rows that are listed lie apart."""
    q_bufs, _, _, q_ready, _, _, _ = buffers
    Q: gl.constexpr = COLS // H
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
    _, k_bufs, _, _, _, k_ready, k_free = buffers
    for key in range(first, last, BLOCK_N):
        stage = tile % NUM_K
        mbarrier.wait(k_free.index(stage), (tile // NUM_K & 1) ^ 1)
        mbarrier.expect(k_ready.index(stage), BLOCK_N * D)
        _tma_load(k_desc, [key, 0], k_ready.index(stage), k_bufs.index(stage))
        tile += 1
    return tile


@gluon.jit
def _load_sharded(k_desc, first, last, tile, keys, buffers):
    """Keys that lie as ranks sent them, and their scales. Returns the tile behind the last."""
    _, k_bufs, s_bufs, _, _, k_ready, k_free = buffers
    scales, shards = keys
    lane = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([2], [32], [1], [0]))
    region = region_of(first, shards)
    while (first < last) & (region < shards[1]):
        _begin, stop, first_tile = part_of_region(region, first, last, shards)
        for key in range(first_tile, stop, BLOCK_N):
            line, words, inside = place_of_tile(key, lane, region, shards)
            scale = gl.load(scales + words, mask=inside, other=0.0)
            stage = tile % NUM_K
            mbarrier.wait(k_free.index(stage), (tile // NUM_K & 1) ^ 1)
            s_bufs.index(stage).store(scale)
            _barrier()
            mbarrier.expect(k_ready.index(stage), BLOCK_N * D)
            _tma_load(k_desc, [line, 0], k_ready.index(stage), k_bufs.index(stage))
            tile += 1
        first = stop
        region += 1
    return tile


@gluon.jit
def load_partition(
    q_desc, k_desc, keys, work, rows, buffers, H: gl.constexpr, OPEN: gl.constexpr, SHARDS: gl.constexpr
):
    _, _, _, _, q_free, _, _ = buffers
    num_items = work[2]
    turn = 0
    tile = 0
    for lap in range(gl.cdiv(num_items, gl.num_programs(0))):
        row, first, last = keys_of_item(item_of_lap(lap, gl.program_id(0), gl.num_programs(0)), work, rows, H, OPEN)
        if first < last:
            slot = turn % NUM_Q
            mbarrier.wait(q_free.index(slot), (turn // NUM_Q & 1) ^ 1)
            _load_queries(q_desc, row, rows, slot, buffers, H, OPEN)
            turn += 1
            if SHARDS:
                tile = _load_sharded(k_desc, first, last, tile, keys, buffers)
            else:
                tile = _load_ordered(k_desc, first, last, tile, buffers)
