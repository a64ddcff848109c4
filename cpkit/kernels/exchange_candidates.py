"""Both ends of the exchange of candidates between DCP ranks, a launch each: packing a rank's best, best of all ranks.

    top-k, logits ─► packed candidates ─► all-gather ─► best of all ranks          (candidates.py draws an example)

The bytes are those of candidates.py: 12 a candidate, three words of a score and a position, so that a launch reads
logits and indices and writes what travels, and another reads what came and writes the answer. Both agree with the
functions of candidates.py, step by step; only the order within a row is another: best_of_packed says which.
"""

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.candidates import (
    KeyOrder,
    check_found,
    global_positions,
    global_topk,
    local_candidates,
    pack_candidates,
)
from cpkit.kernels.checks import check_positive, check_shard, check_tensor
from cpkit.planner.collectives import CANDIDATE_BYTES

WORDS = tl.constexpr(3)
"""Of a packed candidate: the score's bits, the position's lower half, its upper half."""
MINUS_INF_BITS = tl.constexpr(-(2**23))
BLOCK = 1024
MOST_AT_ONCE = 16384
"""Candidates of a token that one program holds in registers; more lists are reduced in groups first."""


@triton.jit(
    do_not_specialize=[
        "topk_indices", "logits", "key_start", "out", "num_tokens", "num_keys", "topk_stride", "logits_stride",
        "dcp_rank", "first_key",
    ]
)  # fmt: skip
def _packed_candidates_kernel(
    topk_indices, logits, key_start, out,
    num_tokens: tl.int64, num_keys: tl.int64, topk_stride: tl.int64, logits_stride: tl.int64, dcp_rank: tl.int64,
    first_key: tl.int64, SCORED: tl.constexpr, K: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """SCORED: a row of logits has those of what is kept alone, side by side; key_start is not read."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = i // K
    inside = token < num_tokens
    index = tl.load(topk_indices + token * topk_stride + i % K, mask=inside, other=-1).to(tl.int64)
    kept = index >= 0
    if SCORED:
        column = i % K
    else:
        column = tl.load(key_start + token, mask=inside, other=0).to(tl.int64) + index
    score = tl.load(logits + token * logits_stride + column, mask=kept & (column < num_keys), other=float("-inf"))
    local = first_key + index
    turn = local // INTERLEAVE
    position = tl.where(kept, (turn * DCP_SIZE + dcp_rank) * INTERLEAVE + local - turn * INTERLEAVE, -1)
    words = out + i * WORDS
    tl.store(words, score.to(tl.int32, bitcast=True), mask=inside)
    tl.store(words + 1, position.to(tl.int32), mask=inside)
    tl.store(words + 2, (position >> 32).to(tl.int32), mask=inside)


def packed_candidates(
    topk_indices: torch.Tensor,
    logits: torch.Tensor,
    key_start: torch.Tensor,
    order: KeyOrder,
    *,
    backend: str = "torch",
) -> torch.Tensor:
    """[num_tokens, k, 12] uint8, what a rank sends: arguments as of local_candidates, the result packed."""
    device = topk_indices.device
    check_backend("packed_candidates", backend, BACKENDS, compiled=_packed_candidates_kernel, device=device)
    if backend == "torch":
        return pack_candidates(*local_candidates(topk_indices, logits, key_start, order))
    check_found(topk_indices, logits, key_start, order)
    return _launch_packing(topk_indices, logits, key_start, order, scored=False)


def packed_scores(
    topk_indices: torch.Tensor, scores: torch.Tensor, order: KeyOrder, *, backend: str = "torch"
) -> torch.Tensor:
    """The same of candidates whose scores [num_tokens, k] fp32 lie beside their indices, as indexer_topk gives both."""
    device = topk_indices.device
    check_backend("packed_scores", backend, BACKENDS, compiled=_packed_candidates_kernel, device=device)
    check_shard(order.dcp_size, order.dcp_rank, order.interleave)
    check_tensor("topk_indices", topk_indices, torch.int32, (None, None), device)
    check_tensor("scores", scores, torch.float32, tuple(topk_indices.shape), device)
    if backend == "torch":
        return pack_candidates(
            scores.masked_fill(topk_indices < 0, float("-inf")), global_positions(topk_indices, order)
        )
    return _launch_packing(topk_indices, scores, topk_indices, order, scored=True)


def _launch_packing(
    topk_indices: torch.Tensor, logits: torch.Tensor, key_start: torch.Tensor, order: KeyOrder, *, scored: bool
) -> torch.Tensor:
    num_tokens, k = topk_indices.shape
    out = torch.empty(num_tokens, k, CANDIDATE_BYTES, dtype=torch.uint8, device=topk_indices.device)
    if out.numel():
        _packed_candidates_kernel[(triton.cdiv(num_tokens * k, BLOCK),)](
            topk_indices, logits, key_start, out.view(torch.int32),
            num_tokens, logits.shape[1], topk_indices.stride(0), logits.stride(0), order.dcp_rank, order.first_key,
            SCORED=scored, K=k, DCP_SIZE=order.dcp_size, INTERLEAVE=order.interleave, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _order_bits(score):
    """fp32 -> uint32 that compares as scores do; NaN is 0, below all; -0.0 is +0.0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    signed = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score == score, (signed ^ -2147483648).to(tl.uint32, bitcast=True), 0)


@triton.jit
def _kth_order(order, K: tl.constexpr):
    """The largest number that at least K of the candidates reach, 0 where there are fewer: two bits a round.

    Three counts travel through one sum, 20 bits each.
    """
    last = tl.full([], 0, tl.uint32)
    one = tl.full([], 1, tl.uint32)
    for half in tl.static_range(16):
        step = one << (30 - 2 * half)
        reach1 = (order >= (last | step)).to(tl.int64)
        reach2 = (order >= (last | (step * 2))).to(tl.int64)
        reach3 = (order >= (last | (step * 3))).to(tl.int64)
        counts = tl.sum(reach1 + (reach2 << 20) + (reach3 << 40), axis=0)
        enough = ((counts & 0xFFFFF) >= K).to(tl.uint32)
        enough += (((counts >> 20) & 0xFFFFF) >= K).to(tl.uint32)
        enough += ((counts >> 40) >= K).to(tl.uint32)
        last = last | (step * enough)
    return last


@triton.jit
def _last_tied_position(position, tied, room):
    """The room-th lowest position of the tied candidates, bit by bit from the highest that any has."""
    highest = tl.max(tl.where(tied, position, 0), axis=0)
    bit = tl.full([], 1, tl.int64)
    while bit * 2 <= highest:
        bit = bit * 2
    low = tl.full([], 0, tl.int64)
    while bit > 0:
        below = tl.sum((tied & (position < low + bit)).to(tl.int32), axis=0)
        low = tl.where(below < room, low + bit, low)
        bit = bit // 2
    return low


@triton.jit
def _positions_of(words, held):
    """int64 positions of packed candidates, negative where there is none."""
    lower = tl.load(words + 1, mask=held, other=-1).to(tl.uint32, bitcast=True).to(tl.int64)
    return (tl.load(words + 2, mask=held, other=-1).to(tl.int64) << 32) | lower


@triton.jit(do_not_specialize=["gathered", "scores", "positions", "packed", "num_tokens", "num_lists"])
def _best_of_packed_kernel(
    gathered, scores, positions, packed, num_tokens: tl.int64, num_lists: tl.int64,
    LISTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A program a token and group of LISTS lists. In registers are the orders alone; positions are read when needed."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    held = (i < LISTS * N) & (group * LISTS + i // N < num_lists)
    words = gathered + (((group * LISTS + i // N) * num_tokens + token) * N + i % N) * WORDS
    score = tl.load(words, mask=held, other=0).to(tl.float32, bitcast=True)
    order = tl.where(tl.load(words + 2, mask=held, other=-1) >= 0, _order_bits(score), 0)
    last = _kth_order(order, K)
    chosen = order > last
    tied = (order == last) & (order > 0)
    room = K - tl.sum(chosen.to(tl.int32), axis=0)
    if tl.sum(tied.to(tl.int32), axis=0) > room:
        position = _positions_of(words, tied)
        tied = tied & (position <= _last_tied_position(position, tied, room))
    chosen = chosen | tied
    taken = tl.sum(chosen.to(tl.int32), axis=0)
    place = (group * num_tokens + token) * K + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    score_bits = tl.load(words, mask=chosen, other=0)
    position = _positions_of(words, chosen)
    j = tl.arange(0, triton.next_power_of_2(K))
    empty = (j >= taken) & (j < K)
    rest = (group * num_tokens + token) * K + j
    if PACKED:
        tl.store(packed + place * WORDS, score_bits, mask=chosen)
        tl.store(packed + place * WORDS + 1, position.to(tl.int32), mask=chosen)
        tl.store(packed + place * WORDS + 2, (position >> 32).to(tl.int32), mask=chosen)
        tl.store(packed + rest * WORDS, tl.full(j.shape, MINUS_INF_BITS, tl.int32), mask=empty)
        tl.store(packed + rest * WORDS + 1, tl.full(j.shape, -1, tl.int32), mask=empty)
        tl.store(packed + rest * WORDS + 2, tl.full(j.shape, -1, tl.int32), mask=empty)
    else:
        tl.store(scores + place, score_bits.to(tl.float32, bitcast=True), mask=chosen)
        tl.store(positions + place, position, mask=chosen)
        tl.store(scores + rest, tl.full(j.shape, float("-inf"), tl.float32), mask=empty)
        tl.store(positions + rest, tl.full(j.shape, -1, tl.int64), mask=empty)


def best_of_packed(
    gathered: torch.Tensor, num_lists: int, k: int, *, backend: str = "torch"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores fp32 and global positions int64 [num_tokens, k]: the k best of every rank's packed candidates.

    gathered: [num_lists * num_tokens, n, 12] uint8, rank after rank, as the all-gather lays them. torch: best first;
    triton: in the order in which the ranks sent them; then padding (-inf, -1). Raises PlanError for odd sizes.
    """
    check_backend("best_of_packed", backend, BACKENDS, compiled=_best_of_packed_kernel, device=gathered.device)
    _check_lists(gathered, num_lists, k)
    if backend == "torch":
        return global_topk(gathered, num_lists, k)
    lists = _lists_of(gathered, num_lists, k)
    while len(lists) * lists.shape[2] > MOST_AT_ONCE:
        lists = _best_packed(lists, k)
    return _best_plain(lists, k)


def join_packed(gathered: torch.Tensor, num_lists: int, k: int, *, backend: str = "torch") -> torch.Tensor:
    """The same, packed again, [num_tokens, k, 12] uint8: so a rank joins the lists of its key spans."""
    check_backend("join_packed", backend, BACKENDS, compiled=_best_of_packed_kernel, device=gathered.device)
    _check_lists(gathered, num_lists, k)
    if backend == "torch":
        return pack_candidates(*global_topk(gathered, num_lists, k))
    lists = _best_packed(_lists_of(gathered, num_lists, k), k)
    while len(lists) > 1:
        lists = _best_packed(lists, k)
    return lists[0].view(torch.uint8)


def _check_lists(gathered: torch.Tensor, num_lists: int, k: int) -> None:
    check_positive(num_lists=num_lists, k=k)
    check_tensor("gathered", gathered, torch.uint8, (None, None, CANDIDATE_BYTES), gathered.device)
    if gathered.shape[0] % num_lists:
        raise PlanError(f"{gathered.shape[0]} rows of candidates from {num_lists} ranks: each sends equally many")


def _lists_of(gathered: torch.Tensor, num_lists: int, k: int) -> torch.Tensor:
    """[num_lists, num_tokens, n, 3] int32, the words of the candidates."""
    num_tokens, n = gathered.shape[0] // num_lists, gathered.shape[1]
    if n > MOST_AT_ONCE // 2 or k > MOST_AT_ONCE // 2:
        raise PlanError(f"the best {k} of {n} candidates a rank: at most {MOST_AT_ONCE // 2} of a rank are compared")
    if not n:  # a list without candidates is one of padding, whose position is -1: the kernels read at least one
        gathered, n = gathered.new_full((gathered.shape[0], 1, CANDIDATE_BYTES), 0xFF), 1
    return gathered.contiguous().view(torch.int32).view(num_lists, num_tokens, n, WORDS.value)


def _best_packed(lists: torch.Tensor, k: int) -> torch.Tensor:
    """[groups, num_tokens, k, 3] int32, the best of each group of lists [num_lists, num_tokens, n, 3]."""
    num_lists, num_tokens, n, _ = lists.shape
    sizes, warps = best_sizes(lists_at_once(n), n)
    groups = triton.cdiv(num_lists, sizes["LISTS"])
    out = torch.empty(groups, num_tokens, k, WORDS.value, dtype=torch.int32, device=lists.device)
    if num_tokens:
        _best_of_packed_kernel[(num_tokens, groups)](
            lists, out, out, out, num_tokens, num_lists, K=k, **sizes, PACKED=1, num_warps=warps
        )
    return out


def _best_plain(lists: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and positions [num_tokens, k], the best of all lists."""
    num_lists, num_tokens, n, _ = lists.shape
    scores = torch.empty(num_tokens, k, dtype=torch.float32, device=lists.device)
    positions = torch.empty(num_tokens, k, dtype=torch.int64, device=lists.device)
    sizes, warps = best_sizes(num_lists, n)
    if num_tokens:
        _best_of_packed_kernel[(num_tokens, 1)](
            lists, scores, positions, scores, num_tokens, num_lists, K=k, **sizes, PACKED=0, num_warps=warps
        )
    return scores, positions


def lists_at_once(n: int) -> int:
    """Lists of n candidates that one program reduces to one.  2,048 -> 8"""
    return max(2, MOST_AT_ONCE // n)


def best_sizes(num_lists: int, n: int) -> tuple[dict[str, int], int]:
    """Constants and warps of the kernel for lists of n candidates: up to 64 candidates a thread."""
    block = max(triton.next_power_of_2(num_lists * n), 16)
    return {"LISTS": num_lists, "N": n, "BLOCK": block}, max(4, min(16, block // 512))
