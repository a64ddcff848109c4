"""A rank that enters a collective wrongly, once, to see what is said of it."""

import torch

from cpkit.comm.base import Comm
from cpkit.comm.call import Group
from cpkit.comm.side_channel import SideChannel

FAULTS = ("skipped-collective", "wrong-dtype")


class FaultyComm(Comm):
    """A comm that once, when `fault` says so, leaves out a collective that moves data, or enters it with another dtype.

    The rank goes on with what it has: its own data in the place of the others', rounded data. All else is the comm's.
    """

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm.rank, comm.topology, comm.device)
        self.ledger = comm.ledger
        self.shares_process = comm.shares_process
        self.fault = ""
        self._comm = comm

    def enter(self, op: str, tensor: torch.Tensor, group: str, what: str, reduction: str = "") -> torch.Tensor:
        """As the comm does, but for the fault."""
        members, fault = self.group(group), self.fault
        if members.size == 1 or not tensor.numel() or fault not in FAULTS:
            return self._comm.enter(op, tensor, group, what, reduction)
        self.fault = ""
        if fault == "skipped-collective":
            return _as_if_alone(op, tensor, members)
        other = torch.bfloat16 if tensor.dtype == torch.float32 else torch.float32
        return self._comm.enter(op, tensor.to(other), group, what, reduction).to(tensor.dtype)

    def barrier(self, group: str, *, what: str = "barrier") -> None:
        """That of the comm."""
        self._comm.barrier(group, what=what)

    def side_channel(self) -> SideChannel:
        """That of the comm."""
        return self._comm.side_channel()


def _as_if_alone(op: str, tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A result of the right shape."""
    if op == "all_gather":
        return torch.cat([tensor] * group.size)
    if op == "reduce_scatter":
        return tensor[: tensor.shape[0] // group.size].clone()
    return tensor.clone()
