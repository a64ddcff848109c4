"""Items of a prefill's logits on Hopper: which program scores which rows against which keys, and in what order.

An item is a block of query rows and a chunk of keys. Items go chunk by chunk, so that all programs read the same keys
while they are in cache, and in a chunk from the last block to the first: the last tokens of a prefill see most keys.
Programs take them in laps, forwards and backwards in turn, so who has a long item in one lap has a short one in the
next. 3 programs, 4 blocks, 2 chunks:

    item        0  1  2   3  4  5   6  7
    chunk       0  0  0   0  1  1   1  1
    block       3  2  1   0  3  2   1  0
    program     0  1  2   2  1  0   0  1

An item whose rows end before its chunk costs two small loads, and so does one behind the last in the last lap.
"""

import triton
from triton.experimental import gluon

TILE = 64
"""Keys of one product."""
CACHED_KEYS = 16_384
"""Keys that stay in cache whatever the order of items: 2 MB."""


@gluon.jit
def item_of_lap(lap, program, num_programs):
    """The item that a program takes in a lap; behind the last item in some programs of the last lap."""
    backwards = lap % 2
    return lap * num_programs + program + backwards * (num_programs - 1 - 2 * program)


@gluon.jit
def block_and_chunk(item, num_blocks):
    """Of an item; the chunk of an item behind the last begins behind the last key."""
    return num_blocks - 1 - item % num_blocks, item // num_blocks


def choose_chunk(num_rows: int, num_keys: int, num_blocks: int, sms: int) -> int:
    """Keys of an item, whole tiles: long items start seldom, short ones spread evenly over the multiprocessors.

    Keys that stay in cache are cut into the fewest parts, at most 4, that leave programs idle for at most 8 % of the
    laps; in a causal request an idle program misses only what a row sees of its keys, and that share is what counts.
    More keys, or no more blocks than multiprocessors: a power of two, so that a program gets about 6 items when all
    rows see all keys and 30 when rows are as many as keys, as half of a causal square is empty.

    8,192 rows x 8,192 keys, H=64, 132 multiprocessors -> 8,192;  2,560 x 16,384 -> 8,192;  4,096 x 131,072 -> 8,192
    """
    if num_blocks > sms and num_keys <= CACHED_KEYS:
        seen = max(1 - num_rows / (2 * num_keys), 0.5)
        for parts in (1, 2, 3, 4):
            items = parts * num_blocks
            idle = triton.cdiv(items, sms) * sms / items - 1
            if idle * seen <= 0.08:
                return TILE * int(triton.cdiv(num_keys, parts * TILE))
    items_each = 6 + 24 * min(num_rows, num_keys) / num_keys
    wanted = num_keys * num_blocks / (sms * items_each)
    return next((size for size in (1024, 2048, 4096) if wanted < size * 2**0.5), 8192)
