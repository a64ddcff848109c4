"""What every builder asks of a batch before it writes: the device, the buffers' room, the block tables' reach."""

import torch

from cpkit.budget import Budget
from cpkit.builders.common import RankBatch
from cpkit.errors import PlanError
from cpkit.planner.order import BatchSplit


def check_fits(batch: RankBatch, budget: Budget, device: torch.device) -> None:
    """Raise PlanError for a batch on another device, or larger than buffers of this budget."""
    if batch.query_start_loc.device != device:
        raise PlanError(f"a batch on {batch.query_start_loc.device} for a builder on {device}: build it there")
    for value, what, limit in (
        (batch.num_rows, "rows", "max_num_seqs"),
        (batch.num_tokens, "tokens", "max_num_batched_tokens"),
    ):
        room = getattr(budget, limit)
        if value > room:
            raise PlanError(f"{value} {what}, but the builder's buffers hold {room}: raise {limit} or split the step")


def check_reach(batch: RankBatch, entry_tokens: int) -> None:
    """Raise PlanError where a context is longer than its block table; entry_tokens: tokens that an entry holds."""
    width = batch.block_tables.shape[1]
    longest = int(batch.max_seq_lens.max(initial=0))
    if longest > width * entry_tokens:
        raise PlanError(
            f"row {int(batch.max_seq_lens.argmax())}: seq_len {longest} with a block table of {width} entries of "
            f"{entry_tokens} tokens: allocate its blocks"
        )


def check_update(batch: RankBatch, split: BatchSplit) -> None:
    """Raise PlanError where a draft update's batch has other rows or tokens than the build that it updates."""
    found = batch.num_rows, batch.num_tokens
    built = split.num_decodes + split.num_prefills, split.num_decode_tokens + split.num_prefill_tokens
    decode_tokens = int(batch.host_query_start_loc[min(split.num_decodes, batch.num_rows)])
    if found != built or decode_tokens > split.num_decode_tokens:
        raise PlanError(
            f"a draft update of {found[0]} rows and {found[1]} tokens, {decode_tokens} of them in the first "
            f"{split.num_decodes} rows, after a build of {built[0]} rows and {built[1]} tokens, "
            f"{split.num_decode_tokens} of them of decodes: only lengths and slots move on; build another shape anew"
        )
