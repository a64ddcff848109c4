"""The warp that loads, of the Hopper kernel of decode logits (paged_mqa_logits_gluon.py), and what it tells scorers.

A program's pages begin and end anywhere in the rows. Its pages of one row are a stretch, which the loader walks in
steps of 32, one entry of the block table in each lane; what a step needs of tables and lengths is asked for a step
earlier. A program from page 40 of row 0 up to page 1 of row 2, where rows hold 110, 33 and 5 pages:

    row           0                                       1                     2
    pages         40 .. 71      72 .. 103    104 .. 109   0 .. 31      32       0
    asked for     72 .. 103     104 .. 109   row 1        32           row 2
    told          (0, 40, 110)                            (1, 0, 33)            (2, 0, 1)    STOP

Scorers are told a stretch as it begins: row, first page, page behind the last, and where the keys of its query tokens
end. Queries and weights come by TMA, so scorers read nothing from global memory, and the next stretches are ready
beside the one that they score. All warps share

    work         seq_lens, query tokens of a row, max_keys, and which group of a row's query tokens is scored
    stretches    queries, weights, what is told, ends of keys; barriers of stretches that are ready, or free again
    pages        keys, scales; barriers of pages that are ready, or free again
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

D = gl.constexpr(128)
PAGE = gl.constexpr(64)  # keys of a page
WORDS = gl.constexpr(32)  # fp32 values of a line of 128 bytes
NUM_K = gl.constexpr(12)  # pages in shared memory; with 18, decodes of one query token took 3 % longer on an H200
LANES = gl.constexpr(32)  # of the loader's warp
LEAST = gl.constexpr(-(2**31))  # no entry of a block table is less
TOLD = gl.constexpr(4)  # numbers that scorers are told of a stretch; three are used
STOP = gl.constexpr(-1)  # told as a row: no more stretches

_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name in newer Triton; in 3.6


@gluon.constexpr_function
def product_columns(tokens, heads):
    """Columns (query token, head) of one product."""
    return min(tokens * heads, 128)


@gluon.constexpr_function
def num_stretches(tokens, heads):
    """Stretches in shared memory: the next ones load while one is scored. As many as fit."""
    return 2 if tokens * heads > 128 else 4


@gluon.jit
def _tell(slot, row, page, stop, ends, stretches):
    """All lanes write all of it, so the one that arrives at the barrier next has written it, too."""
    _, _, told, ends_at, _, _ = stretches
    i = gl.arange(0, TOLD, layout=gl.BlockedLayout([TOLD], [LANES], [1], [0]))
    told.index(slot).store(gl.where(i == 0, row, gl.where(i == 1, page, stop)))
    ends_at.index(slot).store(ends)


@gluon.jit
def what_is_told(turn, stretches, SLOTS: gl.constexpr):
    """Wait for the next stretch: its row, STOP behind the last one, its first page and the page behind its last."""
    _, _, told, _, ready, _ = stretches
    slot = turn % SLOTS
    mbarrier.wait(ready.index(slot), turn // SLOTS & 1)
    layout: gl.constexpr = gl.BlockedLayout([TOLD], [LANES], [gl.num_warps()], [0])
    i = gl.arange(0, TOLD, layout=layout)
    numbers = told.index(slot).load(layout)
    row = gl.max(gl.where(i == 0, numbers, LEAST), axis=0)
    page = gl.max(gl.where(i == 1, numbers, LEAST), axis=0)
    stop = gl.max(gl.where(i == 2, numbers, LEAST), axis=0)
    return row, page, stop


@gluon.jit
def _is_before(row, page, last_row, last_page):
    return (row < last_row) | ((row == last_row) & (page < last_page))


@gluon.jit
def _table_blocks(tables, row, page, live, work):
    """A lane's block of the LANES pages from `page` on; -1 behind the row's table and for a row that is not live."""
    _, _, max_keys, _ = work
    block_tables, table_stride, _, _ = tables
    number = page + gl.arange(0, LANES, layout=gl.BlockedLayout([1], [LANES], [1], [0]))
    mask = live & (number < gl.cdiv(max_keys, PAGE))
    return gl.load(block_tables + row.to(gl.int64) * table_stride + number, mask=mask, other=-1)


@gluon.jit
def _row_ends(row, live, work, TOKENS: gl.constexpr):
    """Where the keys of a row's query tokens end, in every lane; 0 for a row that is not live."""
    seq_lens, num_tokens, _, group = work
    token = group * TOKENS + gl.arange(0, TOKENS, layout=gl.BlockedLayout([TOKENS], [LANES], [1], [0]))
    return gl.load(seq_lens + row * num_tokens + token, mask=(token < num_tokens) & live, other=0)


@gluon.jit
def _load_queries(descs, slot, row, work, stretches, H: gl.constexpr, TOKENS: gl.constexpr):
    """The queries and weights of a stretch, product after product."""
    q_desc, w_desc, _, _ = descs
    q_bufs, w_bufs, _, _, ready, _ = stretches
    _, num_tokens, _, group = work
    COLS: gl.constexpr = product_columns(TOKENS, H)
    SPLIT: gl.constexpr = TOKENS * H // COLS
    mbarrier.expect(ready.index(slot), TOKENS * H * (D + 4))
    column = (row * num_tokens + group * TOKENS) * H
    for part in gl.static_range(SPLIT):
        at = slot * SPLIT + part
        _tma_load(q_desc, [column + part * COLS, 0], ready.index(slot), q_bufs.index(at))
        _tma_load(w_desc, [(column + part * COLS) // WORDS, 0], ready.index(slot), w_bufs.index(at))


@gluon.jit
def _load_pages(descs, blocks, count, place, tables, pages):
    """The first `count` of the blocks that lanes hold. Returns the place in the ring behind the last."""
    _, _, k_desc, s_desc = descs
    _, _, page_lines, num_blocks = tables
    k_bufs, s_bufs, ready, free = pages
    stage, phase = place
    lane = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [LANES], [1], [0]))
    blocks = gl.where((blocks >= 0) & (blocks < num_blocks), blocks, -1)  # here, where they have come from memory
    for i in range(count):
        line = gl.max(gl.where(lane == i, blocks, LEAST), axis=0) * page_lines
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(ready.index(stage), PAGE * (D + 4))
        _tma_load(k_desc, [line, 0], ready.index(stage), k_bufs.index(stage))
        _tma_load(s_desc, [line + PAGE, 0], ready.index(stage), s_bufs.index(stage))
        stage += 1
        phase = gl.where(stage == NUM_K, phase ^ 1, phase)
        stage = gl.where(stage == NUM_K, 0, stage)
    return stage, phase


@gluon.jit
def load_partition(descs, share, work, tables, stretches, pages, H: gl.constexpr, TOKENS: gl.constexpr):
    """share: row and page where the program begins, row and page where the next one does."""
    _, _, max_keys, _ = work
    _, _, _, _, ready, free = stretches
    row, page, last_row, last_page = share
    SLOTS: gl.constexpr = num_stretches(TOKENS, H)
    turn = 0
    place = (0, 1)
    begins = gl.to_tensor(True)  # with this step, its stretch
    live = row >= 0  # always: a program without pages takes one step of none
    works = _is_before(row, page, last_row, last_page)
    blocks = _table_blocks(tables, row, page, works, work)
    ends = _row_ends(row, works, work, TOKENS)
    while live:
        num_pages = gl.cdiv(gl.minimum(gl.max(ends, axis=0), max_keys), PAGE)
        stop = gl.maximum(page, gl.where(row == last_row, gl.minimum(num_pages, last_page), num_pages))
        inside = page + LANES < stop
        next_row = gl.where(inside, row, row + 1)
        next_page = gl.where(inside, page + LANES, 0)
        live = inside | _is_before(row + 1, 0, last_row, last_page)
        next_blocks = _table_blocks(tables, next_row, next_page, live, work)
        next_ends = _row_ends(next_row, live, work, TOKENS)
        if begins & (page < stop):
            slot = turn % SLOTS
            mbarrier.wait(free.index(slot), (turn // SLOTS & 1) ^ 1)
            _tell(slot, row, page, stop, ends, stretches)
            _load_queries(descs, slot, row, work, stretches, H, TOKENS)
            turn += 1
        place = _load_pages(descs, blocks, gl.minimum(stop - page, LANES), place, tables, pages)
        begins = inside == 0
        row = next_row
        page = next_page
        blocks = next_blocks
        ends = next_ends
    slot = turn % SLOTS
    mbarrier.wait(free.index(slot), (turn // SLOTS & 1) ^ 1)
    _tell(slot, STOP, page, page, ends, stretches)
    mbarrier.arrive(ready.index(slot), count=1)
