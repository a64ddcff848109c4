"""Exact top-k of each row of logits: which k keys a query token keeps.

logits: [M, N] fp32, rows may lie apart; key_start, key_end: [M] int32. Row m chooses among the positions
key_start[m] .. key_end[m] - 1 (cut to 0 .. N) and nothing outside them is read. Result: [M, k] int32, positions counted
from key_start, -1 behind the last. Which positions is fixed to the bit; their order is the backend's: the reference and
torch say best first, the kernels lowest position first.

The order of keys: higher score first, then lower position; -0.0 equals +0.0; NaN is never chosen; -inf is, rather
than -1.  k=3:

    position    0     1     2     3     4     5
    logits     nan   2.0  -0.0   0.0  -inf   2.0        ->  1 5 2

Two ways, one selection. On NVIDIA the kernels of topk_cuda.py read a row once; where rows are long and few, twice.
Elsewhere the kernel here, of plain Triton, finds the K-th score by bisecting its bits, eight parts at a time: 11 passes
over the row and one to pick.
"""

import torch
import triton
import triton.language as tl

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import INT32_MAX, check_positive, check_ranges, check_tensor
from cpkit.kernels.gpu_kind import gpu_kind
from cpkit.kernels.topk_cuda import topk_rows
from cpkit.kernels.topk_torch import sorted_topk

TOPK = (512, 1024, 2048)
NOT_A_KEY = tl.constexpr(-(2**31))
"""Ranks below every score: NaN and places outside the row."""
BLOCK, NUM_WARPS = 4096, 16


def topk_reference(logits: torch.Tensor, key_start: torch.Tensor, key_end: torch.Tensor, k: int) -> torch.Tensor:
    out = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    for row, (start, end) in enumerate(zip(key_start.tolist(), key_end.tolist(), strict=True)):
        start = max(start, 0)
        scores = logits[row, start : max(min(end, logits.shape[1]), start)] + 0.0  # -0.0 + 0.0 is +0.0
        order = torch.sort(scores, descending=True, stable=True).indices
        order = order[~scores[order].isnan()][:k]
        out[row, : len(order)] = order.int()
    return out


@triton.jit
def _rank_bits(x):
    """fp32 -> int32 that compares as the scores do."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOT_A_KEY)


@triton.jit
def _kth_rank(row_logits, num_keys, K: tl.constexpr, BLOCK: tl.constexpr):
    """The rank of the K-th best key, or one below every key where there are fewer; and how many rank above it."""
    i = tl.arange(0, BLOCK)
    # Invariant: at least K keys reach low (or low is below every score), fewer than K reach high.
    low = NOT_A_KEY + 1
    high = 0x7F800001
    above = 0
    while high - low != 1:  # wraps at first: the range is wider than 2^31
        width = (high - low).to(tl.uint32, bitcast=True)
        counts = tl.zeros([8, BLOCK], tl.int32)
        steps = tl.arange(0, 8).to(tl.uint32) * ((width + 7) >> 3)
        marks = low + tl.minimum(steps, width).to(tl.int32, bitcast=True)
        first = 0
        while first < num_keys:
            x = tl.load(row_logits + first + i, mask=first + i < num_keys, other=float("nan"))
            counts += (_rank_bits(x)[None, :] >= marks[:, None]).to(tl.int32)
            first += BLOCK
        reach = tl.sum(counts, axis=1)
        enough = (reach >= K) | (tl.arange(0, 8) == 0)
        above = tl.maximum(above, tl.max(tl.where(enough, 0, reach), axis=0))
        new_low = tl.max(tl.where(enough, marks, low), axis=0)
        high = tl.min(tl.where(enough, high, marks), axis=0)
        low = new_low
    return low, above


@triton.jit(do_not_specialize=["logits", "key_start", "key_end", "out", "N", "row_stride", "out_stride"])
def _topk_kernel(
    logits, key_start, key_end, out, N: tl.int32, row_stride: tl.int64, out_stride: tl.int64,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.maximum(tl.load(key_start + row), 0)
    end = tl.maximum(tl.minimum(tl.load(key_end + row), N), 0)  # any number: cut before the difference
    num_keys = tl.maximum(end - start, 0)
    row_logits = logits + row * row_stride + start
    row_out = out + row * out_stride
    last, above = _kth_rank(row_logits, num_keys, K, BLOCK)
    i = tl.arange(0, BLOCK)
    taken = 0
    equal_left = K - above
    first = 0
    while first < num_keys:
        x = tl.load(row_logits + first + i, mask=first + i < num_keys, other=float("nan"))
        ranks = _rank_bits(x)
        tied = ranks == last
        chosen = (ranks > last) | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= equal_left))
        place = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(row_out + place, first + i, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), axis=0)
        equal_left -= tl.sum((chosen & tied).to(tl.int32), axis=0)
        first += BLOCK
    j = tl.arange(0, K)
    tl.store(row_out + j, tl.full([K], -1, tl.int32), mask=j >= taken)


def topk(
    logits: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    k: int,
    *,
    out: torch.Tensor | None = None,
    backend: str = "triton",
) -> torch.Tensor:
    """Select on the logits' device. triton: one launch, on NVIDIA of topk_cuda.py; torch: any k. Raises ConfigError for
    what a backend is not built for, PlanError for tensors that do not fit.

    A range that ends before it starts is refused where the host can see it; on a GPU, which is not waited for, it
    selects nothing.
    """
    check_backend("topk", backend, BACKENDS, compiled=_topk_kernel, device=logits.device)
    check_positive(k=k)
    if backend == "triton" and k not in TOPK:
        kept = ", ".join(map(str, TOPK))
        raise ConfigError(f"k={k}: the kernels of backend='triton' keep {kept} keys; backend='torch' takes any k")
    check_tensor("logits", logits, torch.float32, (None, None), logits.device)
    M, N = logits.shape
    check_tensor("key_start", key_start, torch.int32, (M,), logits.device)
    check_tensor("key_end", key_end, torch.int32, (M,), logits.device)
    if logits.device.type == "cpu":
        check_ranges(key_start, key_end)
    if max(N, logits.stride(0)) > INT32_MAX - 8192:  # positions of a last, partly empty tile
        raise PlanError(f"logits has rows of {N} keys, {logits.stride(0)} apart: both must stay below 2^31; split rows")
    if out is None:
        out = torch.empty(M, k, dtype=torch.int32, device=logits.device)
    check_tensor("out", out, torch.int32, (M, k), logits.device)
    if backend == "torch":
        sorted_topk(logits, key_start, key_end, out)
        return out
    if M == 0:
        return out
    if gpu_kind(logits.device) != "other":
        topk_rows(logits, key_start, key_end, out)
        return out
    strides = (logits.stride(0), out.stride(0))
    _topk_kernel[(M,)](logits, key_start, key_end, out, N, *strides, K=k, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out
