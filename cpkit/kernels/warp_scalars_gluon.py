"""Scalars of a warp in Gluon: numbers that are the same in all of its lanes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def uniform(x):
    """An int32 that is the same in all lanes, in a register of the warp, as ptxas cannot know that by itself.

    A loop that it bounds keeps counters, places and descriptors there, and not in a register of each lane.
    """
    return gl.inline_asm_elementwise(
        "redux.sync.min.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )
