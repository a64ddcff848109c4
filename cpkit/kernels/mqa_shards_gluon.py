"""Keys of a prefill's logits on Hopper as the DCP ranks sent them, rank after rank: where a tile of 64 keys lies.

Logits are wanted in token order, which deals the keys of a request out in turns of `interleave`; key_shards.py has the
layout and the formulas. An interleave of whole tiles leaves each tile of a request to one rank, so a tile is a box of
memory as ever, and nothing but its place changes. Two ranks, interleave 128, a request of 300 keys:

    token order     0 .. 63   64 .. 127   128 .. 191   192 .. 255   256 .. 299
    rank            0         0           1            1            0
    its keys        0 .. 63   64 .. 127     0 .. 63     64 .. 127   128 .. 171

Tiles are counted from the first key of a region, so query rows that see several regions (their block spans requests)
score one region after another. The loader finds a tile's line and puts its scales, which lie apart from the values,
beside them in shared memory: scorers see tiles in token order, as if keys lay so.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cpkit.kernels.mqa_items_gluon import TILE

TILE_KEYS = gl.constexpr(TILE)

LINE_WORDS = gl.constexpr(32)  # fp32 words that the values of a key take; its scale takes another


@gluon.jit
def region_of(key, shards):
    """The region that holds a key in token order; the last one for a key behind all."""
    local_start, num_regions, steps, ranks, _, _ = shards
    region = 0
    last = num_regions - 1
    for _ in range(steps):
        middle = (region + last) // 2
        behind = (gl.load(local_start + middle + 1) * ranks <= key) & (region < last)
        region = gl.where(behind, middle + 1, region)
        last = gl.where(behind, last, middle)
    return region


@gluon.jit
def part_of_region(region, first, last, shards):
    """Of the keys first .. last - 1 those in a region, begin .. stop - 1, and the key that the first tile begins at."""
    local_start, _, _, ranks, _, _ = shards
    region_start = gl.load(local_start + region) * ranks
    region_end = gl.load(local_start + region + 1) * ranks
    begin = gl.maximum(first, region_start)
    stop = gl.maximum(gl.minimum(last, region_end), begin)
    first_tile = gl.where(begin < stop, begin - (begin - region_start) % TILE_KEYS, stop)
    return begin, stop, first_tile


@gluon.jit
def place_of_tile(key, lane, region, shards):
    """Of the tile of keys from `key` on in token order: the line of its values, the words of its scales, and which of
    these are a shard's own. lane: which key of the tile.
    """
    local_start, _, _, ranks, interleave, shard_keys = shards
    region_local = gl.load(local_start + region)
    at = key - region_local * ranks
    turn = at // interleave
    rounds = turn // ranks
    owner = turn - rounds * ranks
    local = region_local + at - (turn - rounds) * interleave
    before = owner * shard_keys
    lines_of_scales = gl.cdiv(before, LINE_WORDS)
    own = local + lane
    behind = own >= lines_of_scales * LINE_WORDS - before
    word = before.to(gl.int64) * (LINE_WORDS + 1) + own + gl.where(behind, shard_keys.to(gl.int64) * LINE_WORDS, 0)
    return before + lines_of_scales + local, word, (own >= 0) & (own < shard_keys)
