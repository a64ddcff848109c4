"""Ranks show each other the digests of their plans before a step, so that a disagreement is told and not waited for."""

import torch

from cpkit.comm.base import Comm
from cpkit.comm.call import lines_by_rank
from cpkit.errors import DesyncError
from cpkit.step import StepPlan

DIGEST_DIGITS = 16


def check_plans_agree(comm: Comm, plan: StepPlan) -> None:
    """Raise DesyncError, on every rank alike, unless all ranks of the world planned the same step; names the fields.

    One all-gather of a few hundred bytes, which is not part of the plan's list.
    """
    digests = plan.digests()
    text = "".join(digests.values()).encode()
    assert len(text) == DIGEST_DIGITS * len(digests), "a digest is 16 hex digits"
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(comm.device)
    gathered = comm.all_gather(sent, "world", what="digests").view(-1, len(text)).cpu().numpy()
    comm.ledger.take()
    said = ["".join(map(chr, row)) for row in gathered.tolist()]
    if len(set(said)) == 1:
        return
    lines = ["ranks planned different steps"]
    for number, field in enumerate(digests):
        part = slice(number * DIGEST_DIGITS, (number + 1) * DIGEST_DIGITS)
        values = {rank: f"{field} {one[part]}" for rank, one in enumerate(said)}
        if len(set(values.values())) > 1:
            lines += lines_by_rank(values)
    raise DesyncError("\n".join(lines))
