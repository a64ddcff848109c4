"""Scalars of a warp in Gluon: numbers that are the same in all of its lanes, and how a lane's number becomes one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LANES = gl.constexpr(32)
LEAST = gl.constexpr(-(2**31))


@gluon.jit
def uniform(x):
    """An int32 that is the same in all lanes, in a register of the warp, as ptxas cannot know that by itself.

    A loop that it bounds keeps counters, places and descriptors there, and not in a register of each lane.
    """
    return gl.inline_asm_elementwise(
        "redux.sync.min.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def one_a_lane():
    """[32]: 0 .. 31, one in each lane of a single warp."""
    return gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def of_lane(x, lane):
    """The number that one lane has of x [32], laid out as one_a_lane is."""
    return gl.max(gl.where(one_a_lane() == lane, x, LEAST), axis=0)
