"""From kept positions to physical rows: of this rank's shard of the cache, or of a gathered prefill workspace.

block_size=2, dcp_size=2, interleave=1, block table 4 6:

    position                5  2  0 -1  3
    shard_slots, rank 0     -  9  8  -  -       - is -1: no position, another rank's, or behind the block table
    shard_slots, rank 1    12  -  -  -  9
    compact_slots, rank 0   9  8  -  -  -       2 kept, in their former order: every run gives the same list

rank_stride=4, workspace_start=1, parts of 4 rows a rank:

    workspace              .  t0 t2 t4 | .  t1 t3 --
    position               3  0 -1
    gathered_slots         6  1  -              owner * rank_stride + workspace_start + local

positions: [num_tokens, k] int32 or int64, negative: none. req: [num_tokens] int32, or through idx_mapping ([num_reqs]
int32, a negative entry counts as row 0) row of block_tables [num_rows, width] int32. out: [num_tokens, k] int64, or
int32 where the caller knows that the rows fit; it may be positions.
"""

import torch

from cpkit.kernels.checks import INTS, check_positive, check_shard, check_tensor
from cpkit.kernels.dcp_local_lens import split_position
from cpkit.planner.slots import PAD


def shard_slots_reference(
    positions: torch.Tensor,
    req: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    block_stride: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    idx_mapping: torch.Tensor | None = None,
) -> torch.Tensor:
    if not block_tables.numel():
        return torch.full_like(positions, PAD)
    row = req.long() if idx_mapping is None else idx_mapping[req.long()].clamp(min=0).long()
    owner, local = split_position(positions.clamp(min=0).long(), dcp_size, interleave)
    column = local // block_size
    last = block_tables.shape[1] - 1
    block = block_tables[row[:, None], column.clamp(max=last)].long()
    here = (positions >= 0) & (owner == dcp_rank) & (column <= last)
    return torch.where(here, block * block_stride + local % block_size, PAD)


def shard_slots(
    positions: torch.Tensor,
    req: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    block_stride: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    idx_mapping: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """Write the cache row of each position that this rank owns; block_stride: rows from one block to the next."""
    check_shard(dcp_size, dcp_rank, interleave)
    check_positive(block_size=block_size, block_stride=block_stride)
    device = positions.device
    check_tensor("positions", positions, INTS, (None, None), device)
    check_tensor("req", req, torch.int32, (positions.shape[0],), device)
    check_tensor("block_tables", block_tables, torch.int32, (None, None), device)
    if idx_mapping is not None:
        check_tensor("idx_mapping", idx_mapping, torch.int32, (None,), device)
    check_tensor("out", out, INTS, tuple(positions.shape), device)
    out.copy_(
        shard_slots_reference(
            positions,
            req,
            block_tables,
            block_size=block_size,
            block_stride=block_stride,
            dcp_size=dcp_size,
            dcp_rank=dcp_rank,
            interleave=interleave,
            idx_mapping=idx_mapping,
        )
    )


def gathered_slots_reference(
    positions: torch.Tensor,
    workspace_start: torch.Tensor,
    *,
    rank_stride: int,
    dcp_size: int,
    interleave: int,
) -> torch.Tensor:
    owner, local = split_position(positions.clamp(min=0).long(), dcp_size, interleave)
    row = workspace_start.long()[:, None] + local
    return torch.where((positions >= 0) & (row < rank_stride), owner * rank_stride + row, PAD)


def gathered_slots(
    positions: torch.Tensor,
    workspace_start: torch.Tensor,
    *,
    rank_stride: int,
    dcp_size: int,
    interleave: int,
    out: torch.Tensor,
) -> None:
    """Write the workspace row of each position, whoever owns it.

    workspace_start: [num_tokens] int32 or int64, first row of the token's request in every rank's part.
    """
    check_shard(dcp_size, 0, interleave)
    check_positive(rank_stride=rank_stride)
    check_tensor("positions", positions, INTS, (None, None), positions.device)
    check_tensor("workspace_start", workspace_start, INTS, (positions.shape[0],), positions.device)
    check_tensor("out", out, INTS, tuple(positions.shape), positions.device)
    out.copy_(
        gathered_slots_reference(
            positions, workspace_start, rank_stride=rank_stride, dcp_size=dcp_size, interleave=interleave
        )
    )


def compact_slots_reference(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = slots != PAD
    order = torch.argsort((~kept).int(), dim=1, stable=True)
    return torch.gather(slots, 1, order), kept.sum(1).int()


def compact_slots(slots: torch.Tensor, *, out: torch.Tensor, counts: torch.Tensor) -> None:
    """Move each token's slots to the front of its row of out, and write how many there are.

    slots, out: [num_tokens, k] of one integer dtype, out may be slots; counts: [num_tokens] int32.
    """
    check_tensor("slots", slots, INTS, (None, None), slots.device)
    check_tensor("out", out, slots.dtype, tuple(slots.shape), slots.device)
    check_tensor("counts", counts, torch.int32, (slots.shape[0],), slots.device)
    front, kept = compact_slots_reference(slots)
    out.copy_(front)
    counts.copy_(kept)
