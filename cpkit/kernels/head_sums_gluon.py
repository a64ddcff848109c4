"""Sums over index heads of a product that a Hopper warp group holds in registers, for the logits kernels.

scores: [64 keys, columns] fp32 as wgmma leaves them; a column is a (query token, head), the heads of a token side by
side. All heads of a (token, key) lie in one quad of lanes, each lane holding a quarter of them:

    lane of the quad     0    1    2    3
    heads                0 1  2 3  4 5  6 7  | 8 9 ...       the same for every token and every eighth head

So a chain of fused multiply-adds in registers sums a lane's quarter, in one order for every tile and every Triton, and
one exchange within the quad adds the quarters; after it each lane owns other (token, key) sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = gl.constexpr(64)  # keys of one wgmma: its tall side


@gluon.constexpr_function
def owner_layout(num_tokens):
    """[keys, tokens, 4 parts of the head sum]: a thread owns all parts of its sums, lanes of a quad own other sums.

    One token alone leaves nothing to share out: each lane keeps its part, and all of a quad get the sum.
    """
    parts = [[0, 0, 1], [0, 0, 2]]
    registers, quad = {
        1: ([[8, 0, 0]], parts),
        2: (parts, [[0, 1, 0], [8, 0, 0]]),
        4: ([*parts, [8, 0, 0]], [[0, 1, 0], [0, 2, 0]]),
    }[num_tokens]
    lanes = [*quad, [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, num_tokens, 4])


@gluon.jit
def weighted_head_sums(scores, half_weights, H: gl.constexpr):
    """[keys, tokens]: sums of weight * max(score, 0) over the heads; half_weights: [columns], weights times 0.5.

    x + |x| is 2 max(x, 0) exactly, and runs on the units of the multiply-adds, which are twice as many.
    """
    COLS: gl.constexpr = scores.shape[1]
    xs = _thread_columns(scores, H)
    ws = _thread_columns(gl.expand_dims(half_weights, 0).broadcast_to([KEYS, COLS]), H)
    parts = (xs[0] + gl.abs(xs[0])) * ws[0]
    for i in gl.static_range(1, H // 4):
        parts = gl.fma(xs[i] + gl.abs(xs[i]), ws[i], parts)
    return gl.sum(gl.convert_layout(parts, owner_layout(COLS // H)), axis=2)


@gluon.jit
def _thread_columns(x, H: gl.constexpr):
    """[keys, columns] -> H / 4 tensors [keys, tokens, 4]: the columns of a token that a lane of the quad holds."""
    even, odd = x.reshape([KEYS, x.shape[1] // H, H // 8, 4, 2]).permute((0, 1, 3, 2, 4)).split()
    return _halves(even, H // 8) + _halves(odd, H // 8)


@gluon.jit
def _halves(x, LEAVES: gl.constexpr):
    """[keys, tokens, 4, LEAVES] -> LEAVES tensors [keys, tokens, 4]."""
    if LEAVES == 1:
        return (x.reshape(x.shape[:-1]),)
    else:
        left, right = x.reshape([x.shape[0], x.shape[1], x.shape[2], LEAVES // 2, 2]).split()
        return _halves(left, LEAVES // 2) + _halves(right, LEAVES // 2)
