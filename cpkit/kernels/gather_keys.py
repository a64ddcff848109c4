"""Index keys of all DCP ranks put into token order, or picked at some places: values and scales in one launch.

Where the keys of a shard lie, and what token order is: key_shards.py. `deinterleave_idx` is the same order as an array;
the reference here selects by it, kernels apply the formula, so work is spread over keys however few or long the regions
are, and what is read besides the keys is O(regions). Places behind a region's last key repeat that key.

    gather_keys    all keys of the shards of a collective, in token order
    pick_keys      some of them, at given places of the token order
    pull_keys      all keys, read where they lie in the memory of the ranks that hold them: the collective too

A buffer that peers read has its values in front, from a 16-byte boundary on, and all scales behind: vvvv vvvv ss.
"""

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_tensor
from cpkit.kernels.deinterleave import deinterleave_idx_reference
from cpkit.kernels.key_shards import (
    ROWS,
    IndexKeys,
    KeyShards,
    WorkspaceKeys,
    check_dim,
    check_regions,
    packed_bytes,
    place_in_shards,
    search_steps,
    shard_rows,
    value_word_in_shards,
)
from cpkit.kernels.words import WORD, as_words

NUM_WARPS = 4


def split_planes(packed: torch.Tensor, num_keys: int, dim: int) -> IndexKeys:
    """Values and scales, views of a buffer that peers read: packed [packed_bytes(num_keys, dim)] uint8."""
    check_tensor("packed", packed, torch.uint8, (packed_bytes(num_keys, dim),), packed.device)
    values, scales = packed[: num_keys * dim], packed[num_keys * dim :]
    return values.view(torch.float8_e4m3fn).view(num_keys, dim), scales.view(torch.float32)


def gather_keys_reference(shards: KeyShards) -> IndexKeys:
    idx = deinterleave_idx_reference(
        shards.local_start.long(), shards.num_keys, dcp_size=shards.dcp_size, interleave=shards.interleave
    )
    values, scales = shards.by_rank()
    rows = values.view(torch.uint8).flatten(0, 1)[idx]
    return rows.view(torch.float8_e4m3fn), scales.flatten()[idx]


@triton.jit
def copy_keys(
    from_values, from_scales, to_values, to_scales, key, read, written, WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr
):
    """Move keys by pointers to words: from_values, from_scales, to_scales [ROWS], values to row `key` of to_values.

    What is not read is written as zeros.
    """
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    inside = word < WORDS
    rows = tl.load(from_values[:, None] + word, mask=read[:, None] & inside, other=0)
    scale = tl.load(from_scales, mask=read, other=0)
    tl.store(to_values + key.to(tl.int64)[:, None] * WORDS + word, rows, mask=written[:, None] & inside)
    tl.store(to_scales, scale, mask=written)


@triton.jit(
    do_not_specialize=["num_keys", "num_regions", "steps", "dcp_size", "interleave", "keys_per_rank"],
    do_not_specialize_on_alignment=["local_start", "positions", "out_scales"],
)
def _gather_keys_kernel(
    packed, local_start, positions, out_values, out_scales,
    num_keys: tl.int32, num_regions: tl.int32, steps: tl.int32, dcp_size: tl.int32, interleave: tl.int32,
    keys_per_rank: tl.int32, PICKS: tl.constexpr, ALIGNED: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS keys of the result: all in token order, or with PICKS those at positions. ALIGNED: values fill lines."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = at < num_keys
    key = tl.minimum(at, num_keys - 1)
    if PICKS:
        key = tl.load(positions + key)
    owner, row = shard_rows(local_start, key, num_regions, steps, dcp_size, interleave, keys_per_rank)
    line, scale = place_in_shards(owner, row, keys_per_rank, WORDS)
    if ALIGNED:
        word = line * WORDS
    else:
        word = value_word_in_shards(owner, row, keys_per_rank, WORDS)
    from_values, from_scales = packed + word, packed + scale
    copy_keys(from_values, from_scales, out_values, out_scales + at, at, here, here, WORDS, BLOCK_WORDS)


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
    owner, row = shard_rows(local_start, key_inside, num_regions, steps, dcp_size, interleave, keys_per_rank)
    buffer = tl.multiple_of(tl.load(peers + owner).to(tl.pointer_type(tl.int32)), (16,))
    from_scales = buffer + (keys_per_rank.to(tl.int64) * WORDS + row)
    copy_keys(buffer + row * WORDS, from_scales, out_values, out_scales + key, key, here, here, WORDS, BLOCK_WORDS)


def gather_keys(shards: KeyShards, *, out: IndexKeys | None = None, backend: str = "torch") -> IndexKeys:
    """All keys of the shards in token order."""
    shards.check()
    check_backend("gather_keys", backend, BACKENDS, compiled=_gather_keys_kernel, device=shards.packed.device)
    out = keys_out(out, shards.num_keys, shards.dim, shards.packed.device)
    if not shards.num_keys:
        return out
    if backend == "torch":
        values, scales = gather_keys_reference(shards)
        out[0].view(torch.uint8).copy_(values.view(torch.uint8))
        out[1].copy_(scales)
    else:
        _launch(shards, shards.local_start, out, picks=False)
    return out


def ordered_keys(keys: WorkspaceKeys, *, backend: str = "torch") -> IndexKeys:
    """Keys in token order, which keys side by side are in already."""
    return gather_keys(keys, backend=backend) if isinstance(keys, KeyShards) else keys


def pick_keys(keys: WorkspaceKeys, positions: torch.Tensor, *, backend: str = "torch") -> IndexKeys:
    """The keys at some places of the token order: positions [num] int32 in 0 .. num_keys - 1, in any order."""
    if not isinstance(keys, KeyShards):
        return _at(keys, positions)
    keys.check()
    device = keys.packed.device
    check_backend("pick_keys", backend, BACKENDS, compiled=_gather_keys_kernel, device=device)
    check_tensor("positions", positions, torch.int32, (None,), device)
    if len(positions) and not keys.num_keys:
        raise PlanError(f"{len(positions)} positions among no keys: pick from shards that hold keys")
    if backend == "torch" and len(positions):
        return _at(gather_keys_reference(keys), positions)
    out = keys_out(None, len(positions), keys.dim, device)
    if len(positions):
        _launch(keys, positions, out, picks=True)
    return out


def _at(keys: IndexKeys, positions: torch.Tensor) -> IndexKeys:
    values, scales = keys
    return values.view(torch.uint8)[positions].view(values.dtype), scales[positions]  # torch picks no fp8


def _launch(shards: KeyShards, positions: torch.Tensor, out: IndexKeys, *, picks: bool) -> None:
    num_keys = len(out[1])
    _gather_keys_kernel[grid(num_keys)](
        shards.words(torch.int32), shards.local_start, positions, *out_words(out), num_keys, *shards.sizes(),
        PICKS=picks, ALIGNED=shards.is_aligned, **row_sizes(shards.dim),
    )  # fmt: skip


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


def keys_out(out: IndexKeys | None, num_keys: int, dim: int, device: torch.device) -> IndexKeys:
    """Where the keys go: checked, or new."""
    check_dim(dim)
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
    return out


def out_words(out: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts of a result as words: values [num_keys, dim / 4] and scales, int32."""
    return as_words("out values", out[0]), out[1].view(torch.int32)


def row_sizes(dim: int) -> dict[str, int]:
    """Constants of the kernels and their warps."""
    words = dim // WORD
    return {"WORDS": words, "BLOCK_WORDS": triton.next_power_of_2(words), "ROWS": ROWS, "num_warps": NUM_WARPS}


def grid(num_keys: int) -> tuple[int]:
    """Programs of ROWS keys."""
    return (triton.cdiv(num_keys, ROWS),)
