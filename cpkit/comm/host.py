"""Collectives over processes through host memory: any dtype travels as bytes, sums are made here in group order.

A way of communicating then needs two operations on bytes, and gives the same bits as every other. Before data moves,
the ranks of the group exchange tickets (comm/call.py), so that ranks in different collectives are told so instead of
reading each other's bytes as something else. Tickets are not counted as traffic.

    reduce_scatter = all_to_all of the parts, then their sum in group order
    all_reduce     = all_gather, then the sum in group order
"""

from abc import abstractmethod

import torch

from cpkit.comm.call import TICKET_BYTES, Call, Group, check_agreement
from cpkit.comm.contract import reduce_in_order
from cpkit.comm.transport import Transport

LOOK_S = 0.2
"""How often a rank that waits in a collective looks whether another one has said why it ends."""


class HostComm(Transport):
    """A comm whose ranks are processes that exchange host memory; tensors on a GPU are copied there and back."""

    @abstractmethod
    def _gather_bytes(self, sent: torch.Tensor, group: Group) -> torch.Tensor:
        """[n] uint8, n > 0 -> [group size, n] uint8: what each rank sent, in group order; all on the host."""

    @abstractmethod
    def _exchange_bytes(self, sent: torch.Tensor, group: Group) -> torch.Tensor:
        """[group size, n] uint8, n > 0: row i to the group's i-th rank -> [group size, n]: row i came from it."""

    def _all_gather(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return self._gathered(tensor, group, call).flatten(0, 1)

    def _all_to_all(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return self._exchanged(tensor, group, call).flatten(0, 1)

    def _reduce_scatter(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return reduce_in_order(self._exchanged(tensor, group, call).unbind(), call.reduction)

    def _all_reduce(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return reduce_in_order(self._gathered(tensor, group, call).unbind(), call.reduction)

    def _barrier(self, group: Group, call: Call) -> None:
        with self._naming(group, call):
            self._exchange_tickets(group, call)

    def _gathered(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        """[group size, *shape]: every rank's tensor."""
        with self._naming(group, call):
            self._exchange_tickets(group, call)
            sent = _to_bytes(tensor)
            received = self._gather_bytes(sent, group) if sent.numel() else sent
        return _from_bytes(received, tensor, (group.size, *tensor.shape))

    def _exchanged(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        """[group size, n, ...]: the parts of [group size * n, ...] tensors that are meant for this rank."""
        with self._naming(group, call):
            self._exchange_tickets(group, call)
            sent = _to_bytes(tensor)
            received = self._exchange_bytes(sent.view(group.size, -1), group) if sent.numel() else sent
        return _from_bytes(received, tensor, (group.size, tensor.shape[0] // group.size, *tensor.shape[1:]))

    def _exchange_tickets(self, group: Group, call: Call) -> None:
        """Raise DesyncError, on every rank of the group alike, unless all entered the same collective."""
        ticket = torch.frombuffer(bytearray(call.ticket()), dtype=torch.uint8)
        tickets = self._gather_bytes(ticket, group).numpy().tobytes()
        calls = {
            rank: Call.from_ticket(tickets[i * TICKET_BYTES : (i + 1) * TICKET_BYTES])
            for i, rank in enumerate(group.ranks)
        }
        check_agreement(calls, group)


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8 on the host."""
    return tensor.reshape(-1).view(torch.uint8).cpu()


def _from_bytes(received: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return received.reshape(-1).view(like.dtype).view(shape).to(like.device)
