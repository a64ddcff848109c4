"""Indexer logits of a prefill chunk: how much each query token wants each key.

    out[m, n] = k_scale[n] * sum over heads h of weights[m, h] * max(0, q[m, h] . k[n])   key_start[m] <= n < key_end[m]

q: [M, H, 128] fp8 e4m3, H = 32 or 64, q's scale and the softmax and head scales folded into weights: [M, H] fp32;
keys: k [N, 128] fp8 e4m3 and k_scale [N] fp32, or the N keys of shards (key_shards.py), n their place in token order;
key_start, key_end: [M] int32, cut to 0 .. N. Result: [M, N] fp32; keys of shards give the bits that the same keys give
in token order. Outside its range a row of `out` is not written, and not computed beyond the tile that holds the bound;
top-k reads nothing there. `outside="-inf"` asks for -inf instead, at the price of one more pass over the matrix.

    M=3 query tokens at the end of a request of 5 keys; . is not written

    key          0 1 2 3 4
    token 2      x x x . .
    token 3      x x x x .
    token 4      x x x x x

Sums over heads run in fp32 in one fixed order, so a logit does not depend on tiles or on the rows beside it. The
tensor cores of Hopper add fp8 products with fewer bits than fp32: exact for small integers, else about 1e-4 of |q||k|.
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_tensor
from cpkit.kernels.gather_keys import ordered_keys
from cpkit.kernels.gpu_kind import gpu_kind
from cpkit.kernels.key_shards import KeyShards, WorkspaceKeys, place_in_shards, shard_rows
from cpkit.kernels.mqa_logits_torch import tiled_logits
from cpkit.kernels.mqa_operands import HEAD_DIM, Operands

NUM_HEADS = (32, 64)
Outside = Literal["unwritten", "-inf"]


def mqa_logits_reference(
    q: torch.Tensor,
    keys: WorkspaceKeys,
    weights: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    *,
    outside: Outside = "unwritten",
) -> torch.Tensor:
    """The same in float32, one row at a time; what the kernel leaves unwritten is NaN here."""
    k, k_scale = ordered_keys(keys)
    out = torch.full((len(q), len(k)), float("-inf" if outside == "-inf" else "nan"), device=q.device)
    key = torch.arange(len(k), device=q.device)
    for m in range(q.shape[0]):
        scores = (q[m].float() @ k.float().T).relu()
        logits = k_scale * (weights[m, :, None] * scores).sum(0)
        allowed = (key >= key_start[m]) & (key < key_end[m])
        out[m, allowed] = logits[allowed]
    return out


@triton.jit(
    do_not_specialize=[
        "k_scale", "key_start", "key_end", "out", "M", "N", "q_units", "k_units", "w_units", "out_stride",
        "local_start", "num_regions", "steps", "dcp_size", "interleave", "keys_per_rank",
    ]
)  # fmt: skip
def _mqa_logits_kernel(
    q, k, k_scale, weights, key_start, key_end, out, M: tl.int32, N: tl.int32,
    q_units: tl.int64, k_units: tl.int64, w_units: tl.int64, out_stride: tl.int64,
    local_start, num_regions: tl.int32, steps: tl.int32, dcp_size: tl.int32, interleave: tl.int32,
    keys_per_rank: tl.int32, SHARDS: tl.constexpr,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """ROWS query rows against CHUNK keys; columns of the product are (row, head), so a key's heads lie in a quad.

    q_units, k_units, w_units: from row to row, in units of 16 bytes. SHARDS: k and k_scale are the lines and words of
    shards; else what follows out_stride is not read.
    """
    q_stride = q_units * 16
    k_stride = k_units * 16
    w_stride = w_units * 4
    d = tl.arange(0, 128)
    cols = tl.arange(0, ROWS * H)
    row = tl.program_id(0).to(tl.int64) * ROWS + cols // H
    head = cols % H
    q_cols = tl.load(q + (row * q_stride + head * 128)[None, :] + d[:, None], mask=(row < M)[None, :], other=0.0)
    w = tl.load(weights + row * w_stride + head, mask=row < M, other=0.0)

    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    chunk_start = tl.program_id(1) * CHUNK
    start = tl.maximum(tl.load(key_start + rows, mask=rows < M, other=N), chunk_start)
    end = tl.minimum(tl.load(key_end + rows, mask=rows < M, other=0), tl.minimum(chunk_start + CHUNK, N))
    key = tl.min(tl.where(start < end, start, N), axis=0)
    last = tl.max(tl.where(start < end, end, 0), axis=0)
    while key < last:
        keys = key + tl.arange(0, BLOCK_N)
        row_of_key, scale_of_key = keys.to(tl.int64), keys
        if SHARDS:
            owner, shard_row = shard_rows(
                local_start, tl.minimum(keys, N - 1), num_regions, steps, dcp_size, interleave, keys_per_rank
            )
            row_of_key, scale_of_key = place_in_shards(owner, shard_row, keys_per_rank, WORDS=32)
        k_tile = tl.load(k + row_of_key[:, None] * k_stride + d[None, :], mask=(keys < N)[:, None], other=0.0)
        scores = tl.maximum(tl.dot(k_tile, q_cols), 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
        scale = tl.load(k_scale + scale_of_key, mask=keys < N)
        logits = tl.sum(scores.reshape(BLOCK_N, ROWS, H), axis=2) * scale[:, None]
        allowed = (keys[:, None] >= start[None, :]) & (keys[:, None] < end[None, :])
        tl.store(out + rows[None, :] * out_stride + keys[:, None], logits, mask=allowed)
        key += BLOCK_N


def mqa_logits(
    q: torch.Tensor,
    keys: WorkspaceKeys,
    weights: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    *,
    outside: Outside = "unwritten",
    out: torch.Tensor | None = None,
    backend: str = "triton",
) -> torch.Tensor:
    """Score on the operands' device. triton: Hopper takes the kernel of mqa_logits_gluon.py, everything else the
    portable one here; torch: any number of heads and values, and shards are put into token order first. Raises
    ConfigError for a backend that does not run here, PlanError for what it does not take.

    A range that ends before it starts is refused where the host can see it; on a GPU, which is not waited for, it is
    empty.
    """
    check_backend("mqa_logits", backend, BACKENDS, compiled=_mqa_logits_kernel, device=q.device)
    if backend == "triton":
        check_sizes(q)
    operands = Operands(q, keys, weights, key_start, key_end)
    operands.check()
    if backend == "triton":
        operands.check_alignment()
    M, H, N = q.shape[0], q.shape[1], operands.num_keys
    if outside not in ("unwritten", "-inf"):
        raise PlanError(f"outside={outside!r}: it is 'unwritten' or '-inf'")
    if out is None:
        out = torch.empty(M, N, dtype=torch.float32, device=q.device)
    check_tensor("out", out, torch.float32, (M, N), q.device)
    if outside == "-inf":
        out.fill_(float("-inf"))
    if M == 0 or N == 0:
        return out
    if backend == "torch":
        tiled_logits(Operands(q, ordered_keys(keys), weights, key_start, key_end), out)
        return out
    if gpu_kind(q.device) == "hopper":
        from cpkit.kernels.mqa_logits_gluon import mqa_logits_hopper  # Gluon exists for NVIDIA builds of Triton only

        mqa_logits_hopper(operands, out)
        return out
    sizes = mqa_logits_sizes(H)
    grid = (triton.cdiv(M, sizes["ROWS"]), triton.cdiv(N, sizes["CHUNK"]))
    _mqa_logits_kernel[grid](
        *operands.all(), out, M, N, *operands.row_units(), out.stride(0), *operands.places(),
        SHARDS=isinstance(keys, KeyShards), H=H, **sizes, num_warps=8,
    )  # fmt: skip
    return out


def mqa_logits_sizes(num_heads: int) -> dict[str, int]:
    """Constants of the portable kernel: 128 columns (row, head), 128 keys a tile."""
    return {"ROWS": 128 // num_heads, "BLOCK_N": 128, "CHUNK": 4096}


def check_sizes(q: torch.Tensor) -> None:
    """What the kernels are written for."""
    check_tensor("q", q, torch.float8_e4m3fn, (None, None, None), q.device)
    _, H, D = q.shape
    if D != HEAD_DIM:
        raise PlanError(f"q has heads of {D} values: the kernels of backend='triton' take 128; backend='torch' any")
    if H not in NUM_HEADS:
        raise PlanError(
            f"q has {H} index heads: the kernels of backend='triton' take 32 or 64; pad q and weights with zeros, or "
            "name backend='torch'"
        )
    if q.stride(1) != HEAD_DIM:
        raise PlanError(f"q has strides {q.stride()}: the heads of a token must lie side by side; call .contiguous()")
