"""Indexer logits of decode rows, with keys read from the pages of the cache: how much each query token wants each key.

    out[r * n + i, key] = scale[key] * sum over heads h of weights[r * n + i, h] * max(0, q[r, i, h] . value[key])
                          0 <= key < seq_lens[r, i]

The formula is that of mqa_logits.py; key number `key` of row r lies in cache block block_tables[r, key // 64] at offset
key % 64 (index_cache.py has the format of a page). 2 query tokens of a row whose request holds 130 keys:

    block_tables[r]   7        3        9
    keys              0 .. 63  64..127  128 129
    seq_lens[r]       129 130           the draft token sees one key more; nothing is written behind a token's last key

q: [R, n, H, 128] fp8 e4m3, H = 32 or 64, q's scale and the softmax and head scales folded into weights: [R * n, H]
fp32; cache: [num_blocks, page_bytes] uint8; seq_lens: [R, n] int32, cut to 0 .. max_keys; block_tables: [R, width]
int32, width at least max_keys / 64. A block outside the cache reads as keys of zeros, so their logits are 0.
Result: [R * n, max_keys] fp32.

Workers read equally many pages, wherever rows begin and end (tile_schedule.py): one request of 1M keys beside 63 of
1,000 keeps the whole chip at work.
"""

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import INT32_MAX, check_tensor
from cpkit.kernels.gpu_kind import gpu_kind
from cpkit.kernels.index_cache import gather_index_keys
from cpkit.kernels.mqa_logits import NUM_HEADS
from cpkit.kernels.mqa_operands import ALIGNMENT, HEAD_DIM
from cpkit.kernels.table_slots import table_slots
from cpkit.kernels.tile_schedule import tile_schedule

PAGE_KEYS = 64
"""Keys of a cache block, and of a tile of the schedule."""

PAGE_BYTES = PAGE_KEYS * (HEAD_DIM + 4)
PAGE_UNITS = (ALIGNMENT, 4)
"""Bytes of which distances between pages are multiples: 16 where a page's keys can be read 16 bytes at once."""
COLUMNS = 256
"""(query token, head) columns that share a reading of a page; further query tokens read it again."""


def paged_mqa_logits_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    max_keys: int,
) -> torch.Tensor:
    """The same in float32, one row at a time; what the kernel leaves unwritten is NaN here."""
    rows, num_tokens, _, _ = q.shape
    out = torch.full((rows * num_tokens, max_keys), float("nan"), device=q.device)
    for r in range(rows):
        end = seq_lens[r].clamp(0, max_keys)
        held = int(end.max()) if num_tokens else 0
        start_loc = torch.tensor([0, held], device=q.device)
        slots = table_slots(start_loc, block_tables[r : r + 1], end.max()[None], held, block_size=PAGE_KEYS)
        values, scales = gather_index_keys(cache, slots, block_size=PAGE_KEYS)
        for i in range(num_tokens):
            scores = (q[r, i].float() @ values.float().T).relu()
            logits = scales * (weights[r * num_tokens + i, :, None] * scores).sum(0)
            out[r * num_tokens + i, : end[i]] = logits[: end[i]]
    return out


@triton.jit(
    do_not_specialize=[
        "seq_lens", "block_tables", "schedule", "out", "num_tokens", "num_blocks", "max_keys", "page_stride",
        "table_stride", "out_stride",
    ]
)  # fmt: skip
def _paged_mqa_logits_kernel(
    q, cache, weights, seq_lens, block_tables, schedule, out, num_tokens: tl.int32, num_blocks: tl.int32,
    max_keys: tl.int32, page_stride: tl.int64, table_stride: tl.int64, out_stride: tl.int64,
    H: tl.constexpr, TOKENS: tl.constexpr, PAGE_UNIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One worker: its pages from schedule[w] up to schedule[w + 1], for TOKENS query tokens of each row.

    page_stride: from page to page, in units of PAGE_UNIT bytes.
    """
    d = tl.arange(0, 128)
    cols = tl.arange(0, TOKENS * H)
    token = tl.program_id(1) * TOKENS + cols // H
    lane_token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    offset = tl.arange(0, 64)
    worker = tl.program_id(0) * 2
    row = tl.load(schedule + worker).to(tl.int64)
    page = tl.load(schedule + worker + 1)
    last_row = tl.load(schedule + worker + 2).to(tl.int64)
    last_page = tl.load(schedule + worker + 3)
    while (row < last_row) | ((row == last_row) & (page < last_page)):
        place = row * num_tokens + token
        q_cols = tl.load(
            q + (place * H + cols % H)[None, :] * 128 + d[:, None], mask=(token < num_tokens)[None, :], other=0.0
        )
        w = tl.load(weights + place * H + cols % H, mask=token < num_tokens, other=0.0)
        lane_place = row * num_tokens + lane_token
        end = tl.minimum(tl.load(seq_lens + lane_place, mask=lane_token < num_tokens, other=0), max_keys)
        longest = tl.max(end, axis=0)
        stop = tl.minimum(tl.cdiv(longest, 64), tl.where(row == last_row, last_page, 2147483647))
        for number in tl.range(page, stop, num_stages=STAGES):
            block = tl.load(block_tables + row * table_stride + number + offset * 0).to(tl.int64)
            held = (block >= 0) & (block < num_blocks)
            start = cache + block * (page_stride * PAGE_UNIT)
            k_tile = tl.load(
                (start + offset * 128)[:, None] + d[None, :], mask=held[:, None], other=0
            ).to(tl.float8e4nv, bitcast=True)  # fmt: skip
            scale = tl.load((start + 8192).to(tl.pointer_type(tl.float32)) + offset, mask=held, other=0.0)
            scores = tl.maximum(tl.dot(k_tile, q_cols), 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
            logits = tl.sum(scores.reshape(64, TOKENS, H), axis=2) * scale[:, None]
            keys = number * 64 + offset
            allowed = keys[:, None] < end[None, :]
            tl.store(out + lane_place[None, :] * out_stride + keys[:, None], logits, mask=allowed)
        row += 1
        page = 0


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    max_keys: int,
    schedule: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "triton",
) -> torch.Tensor:
    """Score on the device. Hopper takes the kernel of paged_mqa_logits_gluon.py, everything else the portable one.

    schedule: [num_workers + 1, 2] int32 of tile_schedule over the longest token of each row, made here if not given.
    """
    check_backend("paged_mqa_logits", backend, BACKENDS, compiled=_paged_mqa_logits_kernel, device=q.device)
    out = _check(q, cache, weights, seq_lens, block_tables, schedule, max_keys, out)
    rows, num_tokens, H, _ = q.shape
    if not rows or not num_tokens or not max_keys:
        return out
    if backend == "torch":
        found = paged_mqa_logits_reference(q, cache, weights, seq_lens, block_tables, max_keys=max_keys)
        allowed = torch.arange(max_keys, device=q.device) < seq_lens.view(-1, 1)
        out[allowed] = found[allowed]
        return out
    if schedule is None:
        schedule = _own_schedule(seq_lens, max_keys)
    if gpu_kind(q.device) == "hopper":
        from cpkit.kernels.paged_mqa_logits_gluon import paged_mqa_logits_hopper  # for NVIDIA builds of Triton only

        paged_mqa_logits_hopper(q, cache, weights, seq_lens, block_tables, schedule, out)
        return out
    sizes = paged_mqa_logits_sizes(H, num_tokens)
    unit = next(unit for unit in PAGE_UNITS if cache.stride(0) % unit == 0)
    strides = (num_tokens, cache.shape[0], max_keys, cache.stride(0) // unit, block_tables.stride(0), out.stride(0))
    grid = (schedule.shape[0] - 1, triton.cdiv(num_tokens, sizes["TOKENS"]))
    _paged_mqa_logits_kernel[grid](
        q, cache, weights, seq_lens, block_tables, schedule, out, *strides, H=H, PAGE_UNIT=unit, **sizes, num_warps=4
    )
    return out


def paged_mqa_logits_sizes(num_heads: int, num_tokens: int) -> dict[str, int]:
    """Constants of the portable kernel: up to COLUMNS columns (query token, head)."""
    most = COLUMNS // num_heads
    return {"TOKENS": min(triton.next_power_of_2(num_tokens), most), "STAGES": 4}


def _own_schedule(seq_lens: torch.Tensor, max_keys: int) -> torch.Tensor:
    workers = 8
    if seq_lens.is_cuda:
        workers = torch.cuda.get_device_properties(seq_lens.device).multi_processor_count
    schedule = torch.empty(workers + 1, 2, dtype=torch.int32, device=seq_lens.device)
    tile_schedule(seq_lens.amax(1).clamp(0, max_keys), tile=PAGE_KEYS, out=schedule)
    return schedule


def _check(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule: torch.Tensor | None,
    max_keys: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    device = q.device
    check_tensor("q", q, torch.float8_e4m3fn, (None, None, None, HEAD_DIM), device)
    rows, num_tokens, H, _ = q.shape
    if H not in NUM_HEADS:
        raise PlanError(f"q has {H} index heads: the kernels take 32 or 64; pad q and weights with zeros")
    check_tensor("weights", weights, torch.float32, (rows * num_tokens, H), device)
    check_tensor("seq_lens", seq_lens, torch.int32, (rows, num_tokens), device)
    if not (q.is_contiguous() and weights.is_contiguous() and seq_lens.is_contiguous()):
        raise PlanError("q, weights and seq_lens must be contiguous: rows side by side; call .contiguous()")
    if q.data_ptr() % ALIGNMENT or weights.data_ptr() % ALIGNMENT:
        raise PlanError(f"q or weights starts at no multiple of {ALIGNMENT} bytes, which kernels read: call .clone()")
    check_tensor("cache", cache, torch.uint8, (None, None), device)
    if cache.shape[1] < PAGE_BYTES or cache.stride(0) % 4 or cache.data_ptr() % ALIGNMENT:
        raise PlanError(
            f"pages of {cache.shape[1]} bytes, {cache.stride(0)} apart, the first at {cache.data_ptr():#x}: "
            f"the kernels read pages of {PAGE_KEYS} keys, {PAGE_BYTES} bytes and more, that start at multiples of 4, "
            f"the first at one of {ALIGNMENT}"
        )
    if max_keys < 0 or max_keys > INT32_MAX - PAGE_KEYS or rows * num_tokens * H > INT32_MAX - COLUMNS:
        raise PlanError(f"max_keys={max_keys}, {rows} rows of {num_tokens} x {H}: keys and columns stay below 2^31")
    check_tensor("block_tables", block_tables, torch.int32, (rows, None), device)
    if block_tables.shape[1] * PAGE_KEYS < max_keys:
        raise PlanError(
            f"block tables of {block_tables.shape[1]} blocks of {PAGE_KEYS} keys cannot hold max_keys={max_keys}"
        )
    if schedule is not None:
        check_tensor("schedule", schedule, torch.int32, (None, 2), device)
        if schedule.shape[0] < 2 or not schedule.is_contiguous():
            raise PlanError(f"a schedule of {tuple(schedule.shape)}: it is [num_workers + 1, 2], contiguous")
    if out is None:
        return torch.empty(rows * num_tokens, max_keys, dtype=torch.float32, device=device)
    check_tensor("out", out, torch.float32, (rows * num_tokens, max_keys), device)
    return out
