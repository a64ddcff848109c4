"""Exact top-k of each row of logits: which k keys a query token keeps.

logits: [M, N] fp32, rows may lie apart; key_start, key_end: [M] int32. Row m chooses among the positions
key_start[m] .. key_end[m] - 1 (cut to 0 .. N) and nothing outside them is read. Result: [M, k] int32, positions counted
from key_start, -1 behind the last; which positions is fixed to the bit, in what order is not: the reference says best
first, the kernel its own order, the same in every run.

The order of keys: higher score first, then lower position; -0.0 equals +0.0; NaN is never chosen; -inf is, rather
than -1.  k=3:

    position    0     1     2     3     4     5
    logits     nan   2.0  -0.0   0.0  -inf   2.0        ->  1 5 2

How the kernel reads a row only once: evenly spaced samples give a threshold that a few more than k keys should reach.
Each lane of the program keeps those it meets in its own slots, so lanes never wait for each other. The k best of
the survivors are found by bisection on their bits. Where the samples misled (fewer than k survivors, or more than fit)
the row is marked and a second kernel counts it exactly, in several passes.
"""

# Triton knows no (*ahead, x), and mypy no tuple that grows.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl

from cpkit.errors import ConfigError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_ranges, check_tensor
from cpkit.kernels.topk_torch import sorted_topk

TOPK = (512, 1024, 2048)
NOT_A_KEY = tl.constexpr(-(2**31))
"""Ranks below every score: NaN and places outside the row."""
NUM_WARPS = 16
EXACT_BLOCK = 4096


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
def _score_bits(rank):
    """Undoes _rank_bits, for ranks of scores."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count(flags):
    return tl.sum(flags.to(tl.int32), axis=0)


@triton.jit
def _nth_largest(ranks, want, slack):
    """The largest t that at least `want` ranks reach, or an earlier t that at most want + slack reach; and how many.

    Each second guess halves the range; the others put t where it would lie if the ranks were spread evenly.
    """
    low = tl.min(tl.where(ranks == NOT_A_KEY, 0x7FFFFFFF, ranks), axis=0)
    high = tl.max(ranks, axis=0)
    reached = _count(ranks >= low)
    beyond = reached * 0  # how many ranks lie above high
    halve = reached < 0
    while (reached > want + slack) & (low < high):
        width = (high - low).to(tl.uint32, bitcast=True) - 1
        share = 0.999 * (reached - want).to(tl.float32) / (reached - beyond).to(tl.float32)
        step = tl.where(halve, width >> 1, (width.to(tl.float32) * share).to(tl.uint32))
        guess = low + 1 + tl.minimum(step, width).to(tl.int32, bitcast=True)
        count = _count(ranks >= guess)
        enough = count >= want
        low = tl.where(enough, guess, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, guess - 1)
        beyond = tl.where(enough, beyond, count)
        halve = halve == 0
    return low, reached


@triton.jit
def _sampled_threshold(row_logits, num_keys, K: tl.constexpr, SAMPLE: tl.constexpr):
    """A score that K keys of the row very likely reach, and not many more: an order statistic of SAMPLE keys.

    Samples come 8 side by side, as memory does. The rank asked for lies 4 standard deviations beyond the K-th key's.
    """
    i = tl.arange(0, SAMPLE)
    step = num_keys // (SAMPLE // 8)
    pos = tl.minimum((i // 8) * step + i % 8, num_keys - 1)  # rows shorter than SAMPLE give some keys twice
    ranks = _rank_bits(tl.load(row_logits + pos))
    expected = K * (SAMPLE / num_keys.to(tl.float32))
    want = (expected + 4.0 * tl.sqrt(expected)).to(tl.int32) + 4
    rank, reached = _nth_largest(ranks, want, want // 16)
    return tl.where(reached < want, float("-inf"), _score_bits(rank))


@triton.jit
def _keep(scores, pos, threshold, slots, place, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Each lane puts a score that reaches the threshold, and its position, into its next slot; returns where."""
    keep = scores >= threshold
    entry = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | pos.to(tl.uint32).to(tl.int64)
    tl.store(slots + place, entry, mask=keep & (place < LANES * DEPTH))
    return tl.where(keep, place + LANES, place)


@triton.jit
def _scan(row_logits, num_keys, threshold, slots, LANES: tl.constexpr, UNROLL: tl.constexpr, DEPTH: tl.constexpr):
    """Lane i keeps those of its keys i, i + LANES .. that reach the threshold; returns how many each lane kept.

    The loads of a tile are under way while the tile before it is sifted; the last full tile is fetched twice.
    """
    lane = tl.arange(0, LANES)
    place = lane
    TILE: tl.constexpr = LANES * UNROLL
    whole = num_keys - num_keys % TILE
    first = 0
    if whole > 0:
        ahead = ()
        for u in tl.static_range(UNROLL):
            ahead = ahead + (tl.load(row_logits + u * LANES + lane),)
        while first < whole:
            scores = ahead
            ahead = ()
            next_tile = row_logits + tl.minimum(first + TILE, whole - TILE)
            for u in tl.static_range(UNROLL):
                ahead = ahead + (tl.load(next_tile + u * LANES + lane),)
            for u in tl.static_range(UNROLL):
                place = _keep(scores[u], first + u * LANES + lane, threshold, slots, place, LANES, DEPTH)
            first += TILE
    if first < num_keys:
        scores = ()
        for u in tl.static_range(UNROLL):
            pos = first + u * LANES + lane
            scores = scores + (tl.load(row_logits + pos, mask=pos < num_keys, other=float("nan")),)
        for u in tl.static_range(UNROLL):
            place = _keep(scores[u], first + u * LANES + lane, threshold, slots, place, LANES, DEPTH)
    return (place - lane) // LANES


@triton.jit
def _pack(slots, packed, kept, LANES: tl.constexpr):
    """Move the lanes' entries side by side; eight loads are under way before the first store waits for one."""
    lane = tl.arange(0, LANES)
    place = tl.cumsum(kept, axis=0) - kept
    depth = 0
    deepest = tl.max(kept, axis=0)
    while depth < deepest:
        entries = ()
        for u in tl.static_range(8):
            entries = entries + (tl.load(slots + (depth + u) * LANES + lane, mask=depth + u < kept, other=0),)
        for u in tl.static_range(8):
            tl.store(packed + place + depth + u, entries[u], mask=depth + u < kept)
        depth += 8
    tl.debug_barrier()


@triton.jit
def _select(packed, total, row_out, K: tl.constexpr, SELECT: tl.constexpr):
    """Write the positions of the K best of `total` entries in their order, then -1."""
    i = tl.arange(0, SELECT)
    entry = tl.load(packed + i, mask=i < total, other=0)
    pos = entry.to(tl.int32)
    score = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    ranks = tl.where(i < total, _rank_bits(score), NOT_A_KEY)
    last, reached = _nth_largest(ranks, K, 0)
    chosen = ranks >= last
    if reached > K:  # the last places go to the lowest positions among the keys that score the same
        tied = ranks == last
        bound, _ = _nth_largest(tl.where(tied, -pos, NOT_A_KEY), K - _count(ranks > last), 0)
        chosen = (ranks > last) | (tied & (-pos >= bound))
    chosen = chosen & (i < total)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(row_out + place, pos, mask=chosen)
    j = tl.arange(0, K)
    tl.store(row_out + j, tl.full([K], -1, tl.int32), mask=j >= _count(chosen))


@triton.jit
def _topk_kernel(
    logits, key_start, key_end, out, slots, packed, is_open, M, N, row_stride,
    K: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, DEPTH: tl.constexpr, SAMPLE: tl.constexpr,
    SELECT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    slots += program * LANES * DEPTH
    packed += program * SELECT
    row = program
    while row < M:
        start = tl.maximum(tl.load(key_start + row), 0)
        num_keys = tl.maximum(tl.minimum(tl.load(key_end + row), N) - start, 0)
        row_logits = logits + row * row_stride + start
        threshold = tl.full([], float("-inf"), tl.float32)
        if num_keys > SELECT:
            threshold = _sampled_threshold(row_logits, num_keys, K, SAMPLE)
        kept = _scan(row_logits, num_keys, threshold, slots, LANES, UNROLL, DEPTH)
        total = tl.sum(kept, axis=0)
        misled = (tl.max(kept, axis=0) > DEPTH) | (total > SELECT) | ((total < K) & (num_keys > SELECT))
        tl.store(is_open + row, misled.to(tl.int8))
        if not misled:
            _pack(slots, packed, kept, LANES)
            _select(packed, total, out + row * K, K, SELECT)
            tl.debug_barrier()  # the next row reuses packed
        row += tl.num_programs(0)


@triton.jit
def _topk_exact_kernel(
    logits, key_start, key_end, out, is_open, M, N, row_stride, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that sampling left open: bisect the K-th score's bits over the whole row, then pick in position order."""
    row = tl.program_id(0).to(tl.int64)
    while row < M:
        if tl.load(is_open + row) != 0:
            start = tl.maximum(tl.load(key_start + row), 0)
            num_keys = tl.maximum(tl.minimum(tl.load(key_end + row), N) - start, 0)
            row_logits = logits + row * row_stride + start
            i = tl.arange(0, BLOCK)
            # Invariant: at least K keys reach low (or low is below every score), fewer than K reach high.
            low = NOT_A_KEY + 1
            high = 0x7F800001
            above = 0
            while (high - low != 1) & (high != low):
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
            taken = 0
            equal_left = K - above
            row_out = out + row * K
            first = 0
            while first < num_keys:
                x = tl.load(row_logits + first + i, mask=first + i < num_keys, other=float("nan"))
                ranks = _rank_bits(x)
                tied = ranks == low
                chosen = (ranks > low) | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= equal_left))
                place = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
                tl.store(row_out + place, first + i, mask=chosen)
                taken += _count(chosen)
                equal_left -= _count(chosen & tied)
                first += BLOCK
            j = tl.arange(0, K)
            tl.store(row_out + j, tl.full([K], -1, tl.int32), mask=j >= taken)
        row += tl.num_programs(0)


def topk(
    logits: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    k: int,
    *,
    out: torch.Tensor | None = None,
    backend: str = "triton",
) -> torch.Tensor:
    """Select on the logits' device. triton: two launches, rows spread over the programs that fit the chip at once;
    torch: any k. Raises ConfigError for what a backend is not built for, PlanError for tensors that do not fit.

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
    if out is None:
        out = torch.empty(M, k, dtype=torch.int32, device=logits.device)
    check_tensor("out", out, torch.int32, (M, k), logits.device)
    if backend == "torch":
        sorted_topk(logits, key_start, key_end, out)
        return out
    if M == 0:
        return out
    sizes = topk_sizes(N)
    programs = min(M, num_programs(logits.device))
    slots = torch.empty(programs, sizes["DEPTH"], sizes["LANES"], dtype=torch.int64, device=logits.device)
    packed = torch.empty(programs, sizes["SELECT"], dtype=torch.int64, device=logits.device)
    is_open = torch.empty(M, dtype=torch.int8, device=logits.device)
    rows = (M, N, logits.stride(0))
    launch = {"num_warps": NUM_WARPS} if logits.device.type != "cuda" else {"num_warps": NUM_WARPS, "maxnreg": 64}
    _topk_kernel[(programs,)](logits, key_start, key_end, out, slots, packed, is_open, *rows, K=k, **sizes, **launch)
    _topk_exact_kernel[(programs,)](
        logits, key_start, key_end, out, is_open, *rows, K=k, BLOCK=EXACT_BLOCK, num_warps=NUM_WARPS
    )
    return out


def topk_sizes(num_keys: int) -> dict[str, int]:
    """Constants of the kernel. A row of up to SELECT keys needs no threshold; longer rows are sampled.

    At k = 2048, 131,072 keys leave 2,900 survivors, 6 a lane; a million keys leave 4,600, 9 a lane.
    """
    longest = num_keys > 262144
    return {"LANES": 512, "UNROLL": 16, "DEPTH": 32, "SAMPLE": 8192, "SELECT": 8192 if longest else 4096}


def num_programs(device: torch.device) -> int:
    """Programs of 16 warps that a device runs at once, or a few under the interpreter."""
    if device.type != "cuda":
        return 4
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)
