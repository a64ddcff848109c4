"""For each key in token order, its place in the rank-major buffer of all-gathered shards.

dcp_size=2, interleave=1, requests of 3 and 1 keys, padded shards of 2 and 1 (-- is padding):

    rank 0 | rank 1       a0 a2 b0 | a1 -- --
    token order           a0 a1 a2 --   b0 --
    deinterleave_idx       0  3  1  4    2  5

The device form of cpkit.planner.gather.GatherPlan.deinterleave_idx; kernels that can, apply the formula in its place.

local_start: [num_regions + 1] int64, where each request's keys start in what one rank sends.
out: [dcp_size * local_start[-1]] int64. Places behind a request's last key stay inside its region.
"""

import torch
import triton
import triton.language as tl

from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_shard, check_tensor
from cpkit.kernels.dcp_local_lens import owners_of_positions, shard_constants, split_position
from cpkit.kernels.token_to_req import rows_of_tokens

BLOCK = 512
NUM_WARPS = 4
"""Keys of one program and its warps."""


def deinterleave_idx_reference(
    local_start: torch.Tensor, num_keys: int, *, dcp_size: int, interleave: int
) -> torch.Tensor:
    key = torch.arange(num_keys, device=local_start.device)
    region = torch.searchsorted(local_start[1:].contiguous() * dcp_size, key, right=True)
    first = local_start[region]
    owner, local = split_position(key - first * dcp_size, dcp_size, interleave)
    last = local_start[region + 1] - first - 1
    return owner * (num_keys // dcp_size) + first + torch.minimum(local, last)


@triton.jit(do_not_specialize=["local_start", "out", "num_regions", "num_keys"])
def _deinterleave_kernel(
    local_start,
    out,
    num_regions: tl.int32,
    num_keys: tl.int64,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    key = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    region = rows_of_tokens(local_start, key // DCP_SIZE, num_regions)
    first = tl.load(local_start + region)
    last = tl.load(local_start + region + 1) - first - 1
    owner, local = owners_of_positions(key - first * DCP_SIZE, DCP_SIZE, INTERLEAVE)
    place = owner * (num_keys // DCP_SIZE) + first + tl.minimum(local, last)
    tl.store(out + key, place, mask=key < num_keys)


def deinterleave_idx(
    local_start: torch.Tensor, *, dcp_size: int, interleave: int, out: torch.Tensor, backend: str = "torch"
) -> None:
    """Write the place of every key into out, whose length is dcp_size times what one rank sends."""
    check_backend("deinterleave_idx", backend, BACKENDS, compiled=_deinterleave_kernel, device=out.device)
    check_shard(dcp_size, 0, interleave)
    check_tensor("local_start", local_start, torch.int64, (None,), out.device)
    check_tensor("out", out, torch.int64, (None,), out.device)
    check_positive(num_regions=local_start.numel() - 1)
    num_keys = out.numel()
    if backend == "torch":
        out.copy_(deinterleave_idx_reference(local_start, num_keys, dcp_size=dcp_size, interleave=interleave))
    elif num_keys:
        _deinterleave_kernel[(triton.cdiv(num_keys, BLOCK),)](
            local_start,
            out,
            local_start.numel() - 1,
            num_keys,
            **shard_constants(dcp_size, interleave),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
