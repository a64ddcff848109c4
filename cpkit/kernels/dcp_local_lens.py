"""The DCP placement on the device, rule for rule that of cpkit.planner.interleave.

How many of the first `lens` keys one rank stores, dcp_size=2, interleave=2:

    lens     0 1 2 3 4 5
    rank 0   0 1 2 2 2 3
    rank 1   0 0 0 1 2 2

lens: int32 or int64, any shape. out: like lens, may be lens itself. interleave counts what lens counts.

`split_position` and `join_position`, which other kernels use: owner and local index of a position, and the way back.
"""

import torch

from cpkit.kernels.checks import INTS, check_shard, check_tensor


def dcp_local_lens_reference(lens: torch.Tensor, *, dcp_size: int, dcp_rank: int, interleave: int) -> torch.Tensor:
    turn = dcp_size * interleave
    full = lens // turn
    return full * interleave + (lens - full * turn - dcp_rank * interleave).clamp(0, interleave)


def dcp_local_lens(lens: torch.Tensor, *, dcp_size: int, dcp_rank: int, interleave: int, out: torch.Tensor) -> None:
    """Write the lengths of one rank's shards into out."""
    check_shard(dcp_size, dcp_rank, interleave)
    check_tensor("lens", lens, INTS, tuple(lens.shape), lens.device)
    check_tensor("out", out, lens.dtype, tuple(lens.shape), lens.device)
    out.copy_(dcp_local_lens_reference(lens, dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave))


def split_position(pos: torch.Tensor, dcp_size: int, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Owner rank and local index of non-negative positions."""
    group = pos // interleave
    turn = group // dcp_size
    return group - turn * dcp_size, turn * interleave + pos - group * interleave


def join_position(owner: int, local: torch.Tensor, dcp_size: int, interleave: int) -> torch.Tensor:
    """Positions of a rank's non-negative local indices; undoes split_position."""
    turn = local // interleave
    return (turn * dcp_size + owner) * interleave + local - turn * interleave
