"""All-gathered index keys back to token order: values and scales in one launch, and no index array is read.

dcp_size=2, interleave=1, requests of 3 and 1 keys, padded shards of 2 and 1 (-- is padding):

    local_start           0 2 3             where each region starts in what one rank sends
    rank 0 | rank 1       a0 a2 b0 | a1 -- --
    token order           a0 a1 a2 --   b0 --

Each key finds its region by bisection and its place by the formula of planner/interleave.py, so work is spread over
keys however few or long the regions are, and what is read besides the keys is O(regions). `deinterleave_idx` is the
same as an array; the reference here selects by it. Places behind a region's last key repeat that key.

`gather_keys` takes the result of a collective; `pull_keys` reads the shards where they lie, in the memory of the ranks
that hold them, and so is the collective too.

values: [dcp_size, keys_per_rank, dim] float8_e4m3fn, dim a multiple of 4; scales: [dcp_size, keys_per_rank] fp32;
ranks may lie apart, and both be views of one packed buffer (`split_planes`). local_start: [num_regions + 1] int32, from
0 to keys_per_rank. interleave in keys. Result: [dcp_size * keys_per_rank, dim] and [dcp_size * keys_per_rank].
"""

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import INT32_MAX, check_positive, check_tensor
from cpkit.kernels.deinterleave import deinterleave_idx_reference
from cpkit.kernels.index_cache import SCALE_BYTES
from cpkit.kernels.words import WORD, as_words, stride_unit

IndexKeys = tuple[torch.Tensor, torch.Tensor]
"""Values [..., num_keys, dim] float8_e4m3fn and scales [..., num_keys] fp32; in front, of several ranks, the rank."""

ROWS = 64
"""Keys of one program."""
NUM_WARPS = 4


def packed_bytes(num_keys: int, dim: int) -> int:
    """Bytes of keys that travel in one buffer: all values, then all scales.  vvvv vvvv ssss ssss"""
    return num_keys * (dim + SCALE_BYTES)


def split_planes(packed: torch.Tensor, num_keys: int, dim: int) -> IndexKeys:
    """Values [ranks, num_keys, dim] and scales [ranks, num_keys], views of packed [ranks, bytes] uint8."""
    check_tensor("packed", packed, torch.uint8, (None, packed_bytes(num_keys, dim)), packed.device)
    if not num_keys:  # torch gives memory without elements strides of its own
        ranks = packed.shape[0]
        return packed.new_empty(ranks, 0, dim, dtype=torch.float8_e4m3fn), packed.new_empty(
            ranks, 0, dtype=torch.float32
        )
    values, scales = packed.split([num_keys * dim, num_keys * SCALE_BYTES], dim=1)
    return values.view(torch.float8_e4m3fn).unflatten(1, (num_keys, dim)), scales.view(torch.float32)


def gather_keys_reference(
    values: torch.Tensor, scales: torch.Tensor, local_start: torch.Tensor, *, interleave: int
) -> IndexKeys:
    dcp_size, keys_per_rank = scales.shape
    idx = deinterleave_idx_reference(
        local_start.long(), dcp_size * keys_per_rank, dcp_size=dcp_size, interleave=interleave
    )
    rows = values.view(torch.uint8).flatten(0, 1)[idx]
    return rows.view(torch.float8_e4m3fn), scales.flatten()[idx]


@triton.jit
def find_places(local_start, key, num_regions, steps, dcp_size, interleave):
    """Region of each key in token order, its place there, its owner, and its local index in the owner's region.

    Results stay inside 0 .. num_regions - 1 and 0 .. dcp_size - 1 whatever local_start holds.
    """
    region = key * 0
    last = region + (num_regions - 1)
    for _ in range(steps):
        middle = (region + last) // 2
        behind = (tl.load(local_start + middle + 1) * dcp_size <= key) & (region < last)
        region = tl.where(behind, middle + 1, region)
        last = tl.where(behind, last, middle)
    start = tl.load(local_start + region)
    at = tl.maximum(key - start * dcp_size, 0)
    turn = at // interleave
    rounds = turn // dcp_size
    local = rounds * interleave + at - turn * interleave
    return region, at, turn - rounds * dcp_size, local


@triton.jit
def _shard_rows(local_start, key, keys_per_rank, num_regions, steps, dcp_size, interleave):
    """Owner of each key and its row in what the owner sends, int64, always in 0 .. keys_per_rank - 1."""
    region, _, owner, local = find_places(local_start, key, num_regions, steps, dcp_size, interleave)
    row = tl.minimum(tl.load(local_start + region) + local, tl.load(local_start + region + 1) - 1)
    return owner, tl.minimum(tl.maximum(row, 0), keys_per_rank - 1).to(tl.int64)


@triton.jit
def copy_keys(
    from_values, from_scales, to_values, to_scales, key, read, written, WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr
):
    """Move the keys at from_values, from_scales [ROWS], pointers to words; what is not read is written as zeros."""
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    inside = word < WORDS
    rows = tl.load(from_values[:, None] + word, mask=read[:, None] & inside, other=0)
    scale = tl.load(from_scales, mask=read, other=0)
    tl.store(to_values + key.to(tl.int64)[:, None] * WORDS + word, rows, mask=written[:, None] & inside)
    tl.store(to_scales + key, scale, mask=written)


@triton.jit(
    do_not_specialize=[
        "num_keys", "keys_per_rank", "num_regions", "steps", "dcp_size", "interleave", "value_stride", "scale_stride",
    ],
    do_not_specialize_on_alignment=["scales", "local_start", "out_scales"],
)  # fmt: skip
def _gather_keys_kernel(
    values, scales, local_start, out_values, out_scales,
    num_keys: tl.int32, keys_per_rank: tl.int32, num_regions: tl.int32, steps: tl.int32, dcp_size: tl.int32,
    interleave: tl.int32, value_stride: tl.int64, scale_stride: tl.int64,
    WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS keys of the result; from rank to rank: value_stride in units of UNIT words, scale_stride in words."""
    key = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = key < num_keys
    key_inside = tl.minimum(key, num_keys - 1)
    owner, row = _shard_rows(local_start, key_inside, keys_per_rank, num_regions, steps, dcp_size, interleave)
    from_values = values + (owner * (value_stride * UNIT) + row * WORDS)
    copy_keys(
        from_values, scales + (owner * scale_stride + row), out_values, out_scales, key, here, here, WORDS, BLOCK_WORDS
    )


@triton.jit(
    do_not_specialize=["num_keys", "keys_per_rank", "num_regions", "steps", "dcp_size", "interleave"],
    do_not_specialize_on_alignment=["peers", "local_start", "out_scales"],
)
def _pull_keys_kernel(
    peers, local_start, out_values, out_scales,
    num_keys: tl.int32, keys_per_rank: tl.int32, num_regions: tl.int32, steps: tl.int32, dcp_size: tl.int32,
    interleave: tl.int32, WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same from each rank's packed buffer; peers: [dcp_size] int64, their addresses, multiples of 16."""
    key = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = key < num_keys
    key_inside = tl.minimum(key, num_keys - 1)
    owner, row = _shard_rows(local_start, key_inside, keys_per_rank, num_regions, steps, dcp_size, interleave)
    buffer = tl.multiple_of(tl.load(peers + owner).to(tl.pointer_type(tl.int32)), (16,))
    from_scales = buffer + (keys_per_rank.to(tl.int64) * WORDS + row)
    copy_keys(buffer + row * WORDS, from_scales, out_values, out_scales, key, here, here, WORDS, BLOCK_WORDS)


def gather_keys(
    values: torch.Tensor,
    scales: torch.Tensor,
    local_start: torch.Tensor,
    *,
    interleave: int,
    out: IndexKeys | None = None,
    backend: str = "torch",
) -> IndexKeys:
    """Keys of all ranks in token order, of rank-major shards."""
    check_backend("gather_keys", backend, BACKENDS, compiled=_gather_keys_kernel, device=values.device)
    check_tensor("values", values, torch.float8_e4m3fn, (None, None, None), values.device)
    (dcp_size, keys_per_rank, dim), device = values.shape, values.device
    check_tensor("scales", scales, torch.float32, (dcp_size, keys_per_rank), device)
    check_regions(local_start, keys_per_rank, dcp_size, interleave, device)
    if keys_per_rank > 1 and values.stride(1) != dim:
        raise PlanError(f"values has strides {values.stride()}: the keys of a rank must lie side by side, {dim} apart")
    out = keys_out(out, dcp_size * keys_per_rank, dim, device)
    if not keys_per_rank:
        return out
    if backend == "torch":
        found = gather_keys_reference(values, scales, local_start, interleave=interleave)
        out[0].view(torch.uint8).copy_(found[0].view(torch.uint8))
        out[1].copy_(found[1])
        return out
    words = as_words("values", values)
    unit = stride_unit(words)
    strides = (words.stride(0) // unit, scales.stride(0))
    num_regions = local_start.numel() - 1
    sizes = (dcp_size * keys_per_rank, keys_per_rank, num_regions, search_steps(num_regions), dcp_size, interleave)
    _gather_keys_kernel[grid(dcp_size * keys_per_rank)](
        words, scales.view(torch.int32), local_start, *out_words(out), *sizes, *strides, UNIT=unit, **row_sizes(dim)
    )
    return out


def pull_keys(
    peers: torch.Tensor, local_start: torch.Tensor, keys_per_rank: int, dim: int, *, interleave: int, out: IndexKeys
) -> IndexKeys:
    """Keys of all ranks in token order, read from each rank's own packed buffer.

    peers: [dcp_size] int64 on the device, addresses of packed buffers of keys_per_rank keys that this device can read,
    each a multiple of 16; nobody may write there until the launch is over. For symmetric memory: comm/symmetric.py.
    """
    check_tensor("peers", peers, torch.int64, (None,), peers.device)
    dcp_size = peers.numel()
    check_backend("pull_keys", "triton", BACKENDS, compiled=_pull_keys_kernel, device=peers.device)
    check_regions(local_start, keys_per_rank, dcp_size, interleave, peers.device)
    out = keys_out(out, dcp_size * keys_per_rank, dim, peers.device)
    if keys_per_rank:
        num_regions = local_start.numel() - 1
        sizes = (dcp_size * keys_per_rank, keys_per_rank, num_regions, search_steps(num_regions), dcp_size, interleave)
        _pull_keys_kernel[grid(dcp_size * keys_per_rank)](peers, local_start, *out_words(out), *sizes, **row_sizes(dim))
    return out


def check_regions(
    local_start: torch.Tensor, keys_per_rank: int, dcp_size: int, interleave: int, device: torch.device
) -> None:
    """Refuse what the kernels cannot address; the values of local_start stay unseen, on the device."""
    check_positive(dcp_size=dcp_size, interleave=interleave)
    check_tensor("local_start", local_start, torch.int32, (None,), device)
    check_positive(num_regions=local_start.numel() - 1)
    if not 0 <= keys_per_rank * dcp_size <= INT32_MAX - ROWS:
        raise PlanError(
            f"{keys_per_rank} keys of each of {dcp_size} ranks: a workspace holds less than 2^31 keys; split the chunk"
        )


def keys_out(out: IndexKeys | None, num_keys: int, dim: int, device: torch.device) -> IndexKeys:
    """Where the keys go: checked, or new."""
    if out is None:
        out = (
            torch.empty(num_keys, dim, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(num_keys, dtype=torch.float32, device=device),
        )
    values, scales = out
    check_tensor("out values", values, torch.float8_e4m3fn, (num_keys, dim), device)
    check_tensor("out scales", scales, torch.float32, (num_keys,), device)
    if not (values.is_contiguous() and scales.is_contiguous()):
        raise PlanError(f"out has strides {values.stride()} and {scales.stride()}: both parts must be contiguous")
    if dim % WORD:
        raise PlanError(f"keys of {dim} values: dim must be a multiple of {WORD}, as kernels move words")
    return out


def out_words(out: IndexKeys) -> IndexKeys:
    """Both parts of a result as words."""
    return as_words("out values", out[0]), out[1].view(torch.int32)


def search_steps(num_regions: int) -> int:
    """Halvings that leave one region."""
    return (num_regions - 1).bit_length()


def row_sizes(dim: int) -> dict[str, int]:
    """Constants of the kernels and their warps."""
    words = dim // WORD
    return {"WORDS": words, "BLOCK_WORDS": triton.next_power_of_2(words), "ROWS": ROWS, "num_warps": NUM_WARPS}


def grid(num_keys: int) -> tuple[int]:
    """Programs of ROWS keys."""
    return (triton.cdiv(num_keys, ROWS),)
