"""Keys of a prefill's logits on Hopper as the DCP ranks sent them, rank after rank: where a tile of 64 keys lies.

Logits are wanted in token order, which deals the keys of a request out in turns of `interleave`; key_shards.py has the
layout and the formulas. An interleave of whole tiles leaves each tile of a request to one rank, so a tile is a box of
memory as ever, and nothing but its place changes. Two ranks, interleave 128, a request of 300 keys:

    token order     0 .. 63   64 .. 127   128 .. 191   192 .. 255   256 .. 299
    rank            0         0           1            1            0
    its keys        0 .. 63   64 .. 127     0 .. 63     64 .. 127   128 .. 171

Tiles are counted from the first key of a region, so query rows that see several regions (their block spans requests)
score one region after another. The scales of a tile lie apart from its values, in one piece too but for a shard's last
keys, some of whose scales lie in front of all values. TMA takes them from where they lie if that is a multiple of 16
bytes, which it is where the shard's keys before the region are a multiple of 4; one request's are none.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cpkit.kernels.mqa_items_gluon import TILE

TILE_KEYS = gl.constexpr(TILE)
LINE_WORDS = gl.constexpr(32)  # fp32 words that the values of a key take; its scale takes another


@gluon.jit
def region_of(key, shards):
    """The region that holds a key in token order; the last one for a key behind all."""
    local_start, num_regions, steps, dcp_size, _, _ = shards
    region = 0
    last = num_regions - 1
    for _ in range(steps):
        middle = (region + last) // 2
        behind = (gl.load(local_start + middle + 1) * dcp_size <= key) & (region < last)
        region = gl.where(behind, middle + 1, region)
        last = gl.where(behind, last, middle)
    return region


@gluon.jit
def part_of_region(region, first, last, shards):
    """Of the keys first .. last - 1 those in a region, begin .. stop - 1, and the key that the first tile begins at."""
    local_start, _, _, dcp_size, _, _ = shards
    region_start = gl.load(local_start + region) * dcp_size
    region_end = gl.load(local_start + region + 1) * dcp_size
    begin = gl.maximum(first, region_start)
    stop = gl.maximum(gl.minimum(last, region_end), begin)
    return begin, stop, begin - (begin - region_start) % TILE_KEYS


@gluon.jit
def first_place(key, region, shards):
    """Of the tile that begins with `key`: its rank, its first key there, and how far into a turn that is."""
    local_start, _, _, dcp_size, interleave, _ = shards
    region_local = gl.load(local_start + region)
    at = key - region_local * dcp_size
    turn = at // interleave
    rounds = turn // dcp_size
    return turn - rounds * dcp_size, region_local + at - (turn - rounds) * interleave, at - turn * interleave


@gluon.jit
def next_place(owner, local, into, shards):
    """The same of the tile behind it, without a division."""
    _, _, _, dcp_size, interleave, _ = shards
    local += TILE_KEYS
    into += TILE_KEYS
    next_turn = into == interleave
    into = gl.where(next_turn, 0, into)
    local = gl.where(next_turn, local - interleave, local)
    owner = gl.where(next_turn, owner + 1, owner)
    next_round = owner == dcp_size
    local = gl.where(next_round, local + interleave, local)
    return gl.where(next_round, 0, owner), local, into


@gluon.jit
def memory_of_tile(owner, local, shards):
    """The line of a tile's values; the word of its first scale, if that lies behind the values of the shard; and how
    many scales lie there.
    """
    keys_per_rank = shards[5]
    before = owner * keys_per_rank
    front = -before & (LINE_WORDS - 1)
    word = before * (LINE_WORDS + 1) + front + keys_per_rank * LINE_WORDS + local
    return (before + front) // LINE_WORDS + before + local, word, keys_per_rank - front


@gluon.jit
def words_of_scales(word, local, num_behind, lane, shards):
    """The word of each scale of a tile, wherever it lies, and which of them are the shard's; lane: 0 .. 63."""
    keys_per_rank = shards[5]
    own = local + lane
    inside = (own >= 0) & (own < keys_per_rank)
    return word + lane - gl.where(own < num_behind, 0, keys_per_rank * (LINE_WORDS + 1)), inside
