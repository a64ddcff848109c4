"""Lists of the logits that pass their row's bound, for the Hopper kernel that writes no others.

A row has a range of keys and a bound, (score, last key): of the range those pass that score more, or the same at no
higher a position than the last key. Keys are scored in runs of tiles in which no key's test differs from that of the
key a tile before. So a logit is compared with one number, which lies in a register for a whole run: the bound's score
where an equal one passes, the next float s' above it where not, and NaN, which nothing reaches, out of the range.

    tile of 64 keys                      0      1      2      3      4      5      6
    row of keys 0 .. 447, (s, 300)       s      s      s      s    s | s'   s'     s'       300 is in tile 4
    row of keys 100 .. 447, (t, 447)     -    - | t    t      t      t      t      t        100 is in tile 1
    runs                               |    |      |             |       |             |

A row has a counter and a list. The passing logits of a tile take the next places of the row's list, in no order:

    row's counter 7, and 16 keys of a tile      . x . . x x . . . . . . . x . .       x: passes
    places                                        8     7 10              9           counter 11

A lane asks the counters itself, for a logit of each of its scorer's two column groups at once: seldom does one pass,
and hardly ever do both. The answer takes long, behind a branch that ptxas moves nothing across. So it is asked for as
soon as the next tile's products are under way, when the warp would wait for them, and used after the first of these
has been summed.

A tile is [64 keys, Q rows] twice: both column groups of a scorer, laid out as head_sums_gluon.py leaves them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cpkit.kernels.mqa_items_gluon import TILE
from cpkit.kernels.warp_scalars_gluon import uniform

TILE_KEYS = gl.constexpr(TILE)
FAR = gl.constexpr(2**31 - 1)  # behind all keys

# Outputs: the place of what passes, that of the first group where both do; the place of the second group's then.
# Inputs: whether each group's logit passes; the addresses of their rows' counters.
CLAIM = gl.constexpr("""{
.reg .pred first, second, any, both;
.reg .b64 counter;
setp.ne.u32 first, $2, 0;
setp.ne.u32 second, $3, 0;
or.pred any, first, second;
and.pred both, first, second;
selp.b64 counter, $4, $5, first;
@any atom.global.gpu.relaxed.add.u32 $0, [counter], 1;
@both atom.global.gpu.relaxed.add.u32 $1, [$5], 1;
}""")


@gluon.jit
def end_of_run(first, stop, tests0, tests1):
    """The key behind the run of tiles that begins with key `first`; all keys end before `stop`.

    tests0, tests1: of both groups' rows [Q] their ranges and bounds: start, end, score, last key.
    """
    change = gl.minimum(_next_change(first, tests0), _next_change(first, tests1))
    same = gl.maximum(change - first, TILE_KEYS) // TILE_KEYS * TILE_KEYS
    return uniform(first + gl.minimum(same, stop - first))


@gluon.jit
def _next_change(first, tests):
    """The next key behind `first` that a row's test treats otherwise than the key before it."""
    start, end, _, last_key = tests
    behind = gl.where(last_key < FAR, last_key + 1, FAR)
    change = gl.minimum(gl.where(start > first, start, FAR), gl.where(end > first, end, FAR))
    return gl.min(gl.minimum(change, gl.where(behind > first, behind, FAR)), axis=0)


@gluon.jit
def thresholds(keys, tests):
    """[64, Q]: what logits must reach to pass, for keys [64, 1] of a tile and those a whole number of tiles behind
    them in the same run.
    """
    start, end, score, last_key = tests
    bits = score.to(gl.int32, bitcast=True)
    above = gl.where(score == 0.0, 1, bits + gl.where(bits >= 0, 1, -1)).to(gl.float32, bitcast=True)
    tie = keys <= gl.expand_dims(last_key, 0)
    reach = gl.where(tie, gl.expand_dims(score, 0), gl.expand_dims(above, 0))
    inside = (keys >= gl.expand_dims(start, 0)) & (keys < gl.expand_dims(end, 0))
    return gl.where(inside & gl.expand_dims(score == score, 0), reach, float("nan"))


@gluon.jit
def claim_places(found, reach, rows, counts):
    """Ask for the places of what passes of a tile's logits; the answer is on its way when this returns.

    Of both column groups, found: the logits, reach: what they must reach, rows: [Q] the rows. Returns which pass, and
    the two results of CLAIM.
    """
    passes0 = found[0] >= reach[0]
    passes1 = found[1] >= reach[1]
    counter0 = (counts + gl.expand_dims(rows[0], 0)).broadcast_to(found[0].shape)
    counter1 = (counts + gl.expand_dims(rows[1], 0)).broadcast_to(found[1].shape)
    claim = gl.inline_asm_elementwise(
        CLAIM, "=r,=r,r,r,l,l", [passes0.to(gl.int32), passes1.to(gl.int32), counter0, counter1],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return passes0, passes1, claim


@gluon.jit
def list_passing(found, keys, claimed, rows, survivors, room):
    """Put what passes at the places that claim_places asked for; keys: [64, 1] the positions of the logits."""
    passes0, passes1, claim = claimed
    _list(found[0], keys, passes0, claim[0], rows[0], survivors, room)
    _list(found[1], keys, passes1, gl.where(passes0, claim[1], claim[0]), rows[1], survivors, room)


@gluon.jit
def _list(logits, keys, passes, place, rows, survivors, room):
    """Put (score bits << 32 | position) at its place in the row's list; what does not fit has only been counted."""
    entry = (logits.to(gl.int32, bitcast=True).to(gl.int64) << 32) | keys.to(gl.uint32).to(gl.int64)
    row_list = gl.expand_dims(survivors + rows.to(gl.int64) * room, 0)
    gl.store(row_list + place, entry, mask=passes & (place < room))
