"""The DCP placement on the device, rule for rule that of cpkit.planner.interleave.

How many of the first `lens` keys one rank stores, dcp_size=2, interleave=2:

    lens     0 1 2 3 4 5
    rank 0   0 1 2 2 2 3
    rank 1   0 0 0 1 2 2

lens: int32 or int64, any shape. out: like lens, may be lens itself. interleave counts what lens counts.

`split_position` and `join_position`, which other kernels use: owner and local index of a position, and the way back.
`owners_of_positions` and `local_lens_of` are the rules inside a kernel.
"""

import torch
import triton
import triton.language as tl

from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import INTS, check_shard, check_tensor

BLOCK = 256
NUM_WARPS = 4


def dcp_local_lens_reference(lens: torch.Tensor, *, dcp_size: int, dcp_rank: int, interleave: int) -> torch.Tensor:
    turn = dcp_size * interleave
    full = lens // turn
    return full * interleave + (lens - full * turn - dcp_rank * interleave).clamp(0, interleave)


@triton.jit
def owners_of_positions(pos, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Owner rank and local index of non-negative positions, of their type, as split_position gives them."""
    group = pos // INTERLEAVE
    turn = group // DCP_SIZE
    return group - turn * DCP_SIZE, turn * INTERLEAVE + pos - group * INTERLEAVE


@triton.jit
def local_lens_of(lens, dcp_rank, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Keys that a rank stores of the first `lens` keys, int64."""
    lens = lens.to(tl.int64)
    full = lens // (DCP_SIZE * INTERLEAVE)
    rest = lens - full * (DCP_SIZE * INTERLEAVE) - dcp_rank * INTERLEAVE
    return full * INTERLEAVE + tl.minimum(tl.maximum(rest, 0), INTERLEAVE)


@triton.jit(
    do_not_specialize=["lens", "out", "num_lens", "width", "lens_stride", "out_stride", "dcp_rank"],
)
def _dcp_local_lens_kernel(
    lens,
    out,
    num_lens: tl.int64,
    width: tl.int64,
    lens_stride: tl.int64,
    out_stride: tl.int64,
    dcp_rank: tl.int64,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = i // width
    column = i - row * width
    n = tl.load(lens + row * lens_stride + column, mask=i < num_lens, other=0)
    tl.store(out + row * out_stride + column, local_lens_of(n, dcp_rank, DCP_SIZE, INTERLEAVE), mask=i < num_lens)


def dcp_local_lens(
    lens: torch.Tensor, *, dcp_size: int, dcp_rank: int, interleave: int, out: torch.Tensor, backend: str = "torch"
) -> None:
    """Write the lengths of one rank's shards into out."""
    check_backend("dcp_local_lens", backend, BACKENDS, compiled=_dcp_local_lens_kernel, device=lens.device)
    check_shard(dcp_size, dcp_rank, interleave)
    check_tensor("lens", lens, INTS, tuple(lens.shape), lens.device)
    check_tensor("out", out, lens.dtype, tuple(lens.shape), lens.device)
    if backend == "torch":
        out.copy_(dcp_local_lens_reference(lens, dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave))
    elif lens.numel():
        _launch(lens, dcp_rank, shard_constants(dcp_size, interleave), out)


def shard_constants(dcp_size: int, interleave: int) -> dict[str, int]:
    """How kernels are compiled for a DCP placement; one rank stores everything, whatever the interleave."""
    return {"DCP_SIZE": dcp_size, "INTERLEAVE": interleave if dcp_size > 1 else 1}


def _launch(lens: torch.Tensor, dcp_rank: int, constants: dict[str, int], out: torch.Tensor) -> None:
    if lens.is_contiguous() and out.is_contiguous():
        lens, out = lens.view(1, -1), out.view(1, -1)
    elif lens.dim() > 2:  # the kernel knows one stride
        for part, part_out in zip(lens, out, strict=True):
            _launch(part, dcp_rank, constants, part_out)
        return
    _dcp_local_lens_kernel[(triton.cdiv(lens.numel(), BLOCK),)](
        lens,
        out,
        lens.numel(),
        lens.shape[-1],
        lens.stride(0),
        out.stride(0),
        dcp_rank,
        **constants,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def split_position(pos: torch.Tensor, dcp_size: int, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Owner rank and local index of non-negative positions."""
    group = pos // interleave
    turn = group // dcp_size
    return group - turn * dcp_size, turn * interleave + pos - group * interleave


def join_position(owner: int, local: torch.Tensor, dcp_size: int, interleave: int) -> torch.Tensor:
    """Positions of a rank's non-negative local indices; undoes split_position."""
    turn = local // interleave
    return (turn * dcp_size + owner) * interleave + local - turn * interleave
