"""A rank that enters a collective wrongly, once, to see what is said of it."""

import torch

from cpkit.comm.base import Comm, Move
from cpkit.comm.call import Call, Group
from cpkit.comm.side_channel import SideChannel

FAULTS = ("skipped-collective", "wrong-dtype")


class FaultyComm(Comm):
    """A comm that once, when `fault` says so, leaves out a collective that moves data, or enters it with another dtype.

    The rank goes on with what it has: its own data in the place of the others', rounded data.
    """

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm.rank, comm.topology, comm.device)
        self.ledger = comm.ledger
        self.shares_process = comm.shares_process
        self.fault = ""
        self._comm = comm

    def side_channel(self) -> SideChannel:
        """That of the comm."""
        return self._comm.side_channel()

    def _issue(
        self, op: str, tensor: torch.Tensor, group: str, what: str, move: Move, reduction: str = ""
    ) -> torch.Tensor:
        members, fault = self.group(group), self.fault
        if members.size == 1 or not tensor.numel() or fault not in FAULTS:
            return super()._issue(op, tensor, group, what, move, reduction)
        self.fault = ""
        if fault == "skipped-collective":
            return _as_if_alone(op, tensor, members)
        other = torch.bfloat16 if tensor.dtype == torch.float32 else torch.float32
        return super()._issue(op, tensor.to(other), group, what, move, reduction).to(tensor.dtype)

    def _all_gather(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return self._comm._all_gather(tensor, group, call)

    def _all_to_all(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return self._comm._all_to_all(tensor, group, call)

    def _reduce_scatter(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return self._comm._reduce_scatter(tensor, group, call)

    def _all_reduce(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return self._comm._all_reduce(tensor, group, call)

    def _barrier(self, group: Group, call: Call) -> None:
        self._comm._barrier(group, call)


def _as_if_alone(op: str, tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A result of the right shape."""
    if op == "all_gather":
        return torch.cat([tensor] * group.size)
    if op == "reduce_scatter":
        return tensor[: tensor.shape[0] // group.size].clone()
    return tensor.clone()
