"""Lists of the logits that pass their row's bound, for the Hopper kernel that writes no others.

A row has a counter and a list. The passing logits of a tile take the next places of the row's list, in no order:

    row's counter 7, and of a warp's 16 keys      . x . . x x . . . . . . . x . .       x: passes
    places: 7 + those that pass before it           7     8 9               10          counter 11

A warp counts by votes, with the lanes that hold the same row, and asks the counters once a tile for all of its rows.
That one atomic operation is a branch, and its answer takes long: so it is asked for as soon as the next tile's products
are under way, when the warp would wait for them, and used after the first of these has been summed.

A tile is [64 keys, Q rows] twice: both column groups of a scorer, laid out as head_sums_gluon.py leaves them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cpkit.kernels.head_sums_gluon import owner_lane, token_lanes

# Outputs: what the counter was, in a lane that asks; for each group how many lanes of this lane's row pass before it.
# Inputs: whether each group's logit passes; the lanes of the same row; the group that this lane asks for, 1 or 2, or
# 0 for none; the address of the counter.
CLAIM = gl.constexpr("""{
.reg .pred p;
.reg .b32 lanes, before, n, n1, n2;
mov.u32 before, %lanemask_lt;
setp.ne.u32 p, $3, 0;
vote.sync.ballot.b32 lanes, p, 0xffffffff;
and.b32 lanes, lanes, $5;
popc.b32 n1, lanes;
and.b32 lanes, lanes, before;
popc.b32 $1, lanes;
setp.ne.u32 p, $4, 0;
vote.sync.ballot.b32 lanes, p, 0xffffffff;
and.b32 lanes, lanes, $5;
popc.b32 n2, lanes;
and.b32 lanes, lanes, before;
popc.b32 $2, lanes;
setp.eq.u32 p, $6, 2;
selp.b32 n, n2, n1, p;
setp.ne.u32 p, $6, 0;
@p atom.global.gpu.relaxed.add.u32 $0, [$7], n;
}""")


@gluon.jit
def claim_places(found, keys, rows0, rows1, counts, num_rows):
    """Ask for the places of what passes of a tile's logits; the answer is on its way when this returns.

    found: the logits of both column groups, keys: [64, 1] their positions; rows0, rows1: of each group the rows, their
    ranges and their bounds, (score, last key). Returns which pass, and the three results of CLAIM.
    """
    passes0 = _passing(found[0], keys, rows0)
    passes1 = _passing(found[1], keys, rows1)
    Q: gl.constexpr = found[0].shape[1]
    SAME_ROW: gl.constexpr = token_lanes(Q)
    token, lane = _token_and_lane(found[0])
    group = gl.where(lane < Q, 1, gl.where(lane < 2 * Q, 2, 0))
    row = gl.where(group == 2, gl.expand_dims(rows1[0], 0), gl.expand_dims(rows0[0], 0))
    group = gl.where(row < num_rows, group, 0)
    claim = gl.inline_asm_elementwise(
        CLAIM, "=r,=r,=r,r,r,r,r,l",
        [passes0.to(gl.int32), passes1.to(gl.int32), SAME_ROW << token, group, counts + row],
        dtype=(gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return passes0, passes1, claim


@gluon.jit
def list_passing(found, keys, claimed, rows0, rows1, survivors, room):
    """Put what passes at the places that claim_places asked for."""
    passes0, passes1, claim = claimed
    token, _ = _token_and_lane(found[0])
    first0 = _from_lane(claim[0], token)
    first1 = _from_lane(claim[0], token + found[0].shape[1])
    _list(found[0], keys, passes0, first0 + claim[1], rows0[0], survivors, room)
    _list(found[1], keys, passes1, first1 + claim[2], rows1[0], survivors, room)


@gluon.jit
def _passing(logits, keys, rows):
    """Which logits pass their row's bound: those that score more, or the same at no higher a position."""
    _, start, end, score, last_key = rows
    score = gl.expand_dims(score, 0)
    passes = (logits > score) | ((logits == score) & (keys <= gl.expand_dims(last_key, 0)))
    return passes & (keys >= gl.expand_dims(start, 0)) & (keys < gl.expand_dims(end, 0))


@gluon.jit
def _token_and_lane(logits):
    """[64, Q] of each logit: its row in the column group, and the lane that owns it."""
    layout: gl.constexpr = logits.type.layout
    token = gl.expand_dims(gl.arange(0, logits.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    key = gl.expand_dims(gl.arange(0, logits.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    return token + key * 0, owner_lane(key, token, logits.shape[1])


@gluon.jit
def _from_lane(x, lane):
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _list(logits, keys, passes, place, rows, survivors, room):
    """Put (score bits << 32 | position) at its place in the row's list; what does not fit has only been counted."""
    entry = (logits.to(gl.int32, bitcast=True).to(gl.int64) << 32) | keys.to(gl.int64)
    row_list = gl.expand_dims(survivors + rows.to(gl.int64) * room, 0)
    gl.store(row_list + place, entry, mask=passes & (place < room))
