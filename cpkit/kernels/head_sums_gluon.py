"""Sums over index heads of a product that a Hopper warp group holds in registers, for the logits kernels.

scores: [64 keys, columns] fp32 as wgmma leaves them; a column is a (query token, head), the heads of a token side by
side. All heads of a (token, key) lie in one quad of lanes, each lane holding a quarter of them:

    lane of the quad     0    1    2    3
    heads                0 1  2 3  4 5  6 7  | 8 9 ...       the same for every token and every eighth head

So a chain of fused multiply-adds in registers sums a lane's quarter, in one order for every tile and every Triton. Then
lanes trade parts in pairs, twice, and add: with the neighbour, then with the other pair. After it each lane owns other
(token, key) sums, each of them (part 0 + part 1) + (part 2 + part 3).

Each trade swaps one bit of the lane with one of the register. Triton makes shuffles of that; both at once would go
through shared memory, with a barrier for the four warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = gl.constexpr(64)  # keys of one wgmma: its tall side


# Wants the four parts of a thread to be there. It does nothing: no four results of multiply-adds are this NaN together.
_AWAIT_PARTS = gl.constexpr("""{
.reg .pred never;
.reg .b32 bits;
and.b32 bits, $0, $1;
and.b32 bits, bits, $2;
and.b32 bits, bits, $3;
setp.eq.u32 never, bits, 0x7fffdead;
@never pmevent 1;
}""")


@gluon.constexpr_function
def _pair_layout(num_tokens):
    """[keys, tokens, 2 halves of the head sum, 2 parts]: a thread owns both parts of a half, its neighbour others."""
    part, half = [0, 0, 0, 1], [0, 0, 1, 0]
    registers, neighbour = {
        1: ([part], [8, 0, 0, 0]),
        2: ([part, [8, 0, 0, 0]], [0, 1, 0, 0]),
        4: ([part, [0, 2, 0, 0], [8, 0, 0, 0]], [0, 1, 0, 0]),
    }[num_tokens]
    lanes = [neighbour, half, [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, num_tokens, 2, 2])


@gluon.constexpr_function
def owner_layout(num_tokens):
    """[keys, tokens, 2 halves of the head sum]: a thread owns both halves of its sums, lanes of a quad own other sums.

    One token alone leaves too little to share out: the two pairs of a quad get the same sums.
    """
    half = [0, 0, 1]
    registers, quad = {
        1: ([half], [[8, 0, 0], [0, 0, 0]]),
        2: ([half], [[0, 1, 0], [8, 0, 0]]),
        4: ([half, [8, 0, 0]], [[0, 1, 0], [0, 2, 0]]),
    }[num_tokens]
    lanes = [*quad, [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, num_tokens, 2])


@gluon.jit
def weighted_head_sums(scores, half_weights, H: gl.constexpr, CHAINS_FIRST: gl.constexpr):
    """[keys, tokens]: sums of weight * max(score, 0) over the heads; half_weights: [columns], weights times 0.5.

    x + |x| is 2 max(x, 0) exactly, and runs on the units of the multiply-adds, which are twice as many. CHAINS_FIRST:
    chains are complete before what follows in the program, the next wait for the tensor cores above all; without it
    ptxas may end them later. The sums are the same bits. It pays where lists follow; before stores of 64 heads' logits
    its four instructions cost more than they gain.
    """
    COLS: gl.constexpr = scores.shape[1]
    TOKENS: gl.constexpr = COLS // H
    xs = _thread_columns(scores, H)
    ws = _thread_columns(gl.expand_dims(half_weights, 0).broadcast_to([KEYS, COLS]), H)
    parts = (xs[0] + gl.abs(xs[0])) * ws[0]
    for i in gl.static_range(1, H // 4):
        parts = gl.fma(xs[i] + gl.abs(xs[i]), ws[i], parts)
    if CHAINS_FIRST:
        gl.static_assert(TOKENS > 1)  # one token: two parts a thread
        tied: gl.constexpr = "=r,=r,=r,=r,0,1,2,3"
        parts = gl.inline_asm_elementwise(_AWAIT_PARTS, tied, [parts], dtype=gl.float32, is_pure=False, pack=4)
    part0, part1 = gl.convert_layout(parts.reshape([KEYS, TOKENS, 2, 2]), _pair_layout(TOKENS)).split()
    half0, half1 = gl.convert_layout(part0 + part1, owner_layout(TOKENS)).split()
    return half0 + half1


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
