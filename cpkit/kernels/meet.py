"""Ranks that wait for each other on the device, for a bounded time: what one wrote before, all may read behind.

Every rank has a pad that the others can write: one word a rank. A meeting has a number, counted on the device, so that
a captured graph counts on. Each rank writes the number into its word of every pad, then waits until its own pad holds
it, or a later one, in every word. Ranks 0 and 1, meetings 1 and 2:

    pad of rank 0     0 0     1 1     1 2       rank 1 is in meeting 2, rank 0 may be anywhere behind meeting 1
    pad of rank 1     0 0     1 1     1 2

A rank that waits longer than timeout_ns stops waiting, notes whom it missed, and never waits again: what it reads then
is anybody's guess, so the caller looks at `state` before it trusts anything (comm/symmetric.py). One program of one
warp; the chip is free for other work meanwhile.

pads: [size] int64, addresses of the ranks' pads; own_pad: [size] int32, this rank's, zero at first.
state: [2] int32, meetings so far and, once a rank was missed, its place + 1, zero at first.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from cpkit.kernels.checks import check_tensor

MAX_RANKS = 1024


@triton.jit(
    do_not_specialize=["place", "size", "timeout_ns"], do_not_specialize_on_alignment=["pads", "own_pad", "state"]
)
def _meet_kernel(pads, own_pad, state, place: tl.int32, size: tl.int32, timeout_ns: tl.int64, RANKS: tl.constexpr):
    number = tl.load(state) + 1
    i = tl.arange(0, RANKS)
    other = i < size
    pad = tl.load(pads + i, mask=other, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(pad + place, tl.full([RANKS], 0, tl.int32) + number, mask=other, sem="release", scope="sys")
    tl.store(state, number)
    deadline = globaltimer() + timeout_ns
    missed = tl.load(state + 1)
    waits = missed == 0
    while waits:
        seen = tl.atomic_add(own_pad + i, tl.zeros([RANKS], tl.int32), mask=other, sem="acquire", scope="sys")
        late = tl.max(tl.where(other & (seen - number < 0), i + 1, 0), axis=0)
        waits = late > 0
        if globaltimer() > deadline:
            missed = late
            waits = late < 0
    tl.store(state + 1, missed)


def meet(pads: torch.Tensor, own_pad: torch.Tensor, state: torch.Tensor, *, place: int, timeout_s: float) -> None:
    """Put a meeting of the ranks on the current stream; place: of this rank among them."""
    size = pads.numel()
    check_tensor("pads", pads, torch.int64, (size,), pads.device)
    check_tensor("own_pad", own_pad, torch.int32, (size,), pads.device)
    check_tensor("state", state, torch.int32, (2,), pads.device)
    _meet_kernel[(1,)](
        pads, own_pad, state, place, size, int(timeout_s * 1e9), RANKS=triton.next_power_of_2(size), num_warps=1
    )
