"""What all ways of communicating share: a call is checked, named and counted, then the ranks carry it out.

A way of communicating provides the five operations of base.py over groups of two ranks and more, the last methods of
the class, and how it is left after an error.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from cpkit.comm.base import Comm
from cpkit.comm.call import Call, Group, call_site
from cpkit.comm.contract import check_moves, check_what, dtype_name
from cpkit.comm.ledger import Issued
from cpkit.comm.side_channel import SideChannel
from cpkit.comm.sockets import ADDRESS_BYTES, CONNECT_S, Listener
from cpkit.errors import ConfigError, DesyncError
from cpkit.topology import GROUPS, Topology

Move = Callable[[torch.Tensor, Group, Call], torch.Tensor]


class Transport(Comm):
    """A comm that reaches the other ranks itself; use it in a `with`, whose end closes it, or after an error leaves."""

    def __init__(self, rank: int, topology: Topology, device: torch.device) -> None:
        super().__init__(rank, topology, device)
        self._numbers = dict.fromkeys(GROUPS, 0)
        self._channel: SideChannel | None = None
        self._moves: dict[str, Move] = {
            "all_gather": self._all_gather,
            "all_to_all": self._all_to_all,
            "reduce_scatter": self._reduce_scatter,
            "all_reduce": self._all_reduce,
        }

    def enter(self, op: str, tensor: torch.Tensor, group: str, what: str, reduction: str = "") -> torch.Tensor:
        """Check, count, and carry out one collective that moves data."""
        members = self.group(group)
        check_what(what)
        check_moves(op, tensor, members, self.device)
        tensor = tensor.detach()
        if members.size == 1:
            return tensor.clone()
        call = self.announce(op, group, what, tensor.dtype, tuple(tensor.shape), reduction)
        return self._moves[op](tensor, members, call)

    def barrier(self, group: str, *, what: str = "barrier") -> None:
        """Not counted: it moves no data."""
        check_what(what)
        members = self.group(group)
        if members.size > 1:
            self._barrier(members, self._call("barrier", group, what, "", (), ""))

    def side_channel(self) -> SideChannel:
        """Opened by the first call, kept until the comm is closed."""
        if self._channel is None:
            self._channel = self._open_side_channel()
        return self._channel

    def announce(
        self, op: str, group: str, what: str, dtype: torch.dtype, shape: tuple[int, ...], reduction: str = ""
    ) -> Call:
        """Number and count a collective that is about to move a tensor of this dtype and shape, in two ranks or more.

        Public for what carries one out by other means (comm/symmetric.py), so that the ledger and the words for a rank
        that never comes are those of any collective. Raises DesyncError where the ledger expects another one.
        """
        call = self._call(op, group, what, dtype_name(dtype), shape, reduction)
        elements = math.prod(shape)
        if elements:
            self.ledger.add(Issued(op, group, what, call.dtype, elements, elements * dtype.itemsize, call.site))
        return call

    def close(self) -> None:
        """Give the groups back; the last call, made by every rank."""
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _call(self, op: str, group: str, what: str, dtype: str, shape: tuple[int, ...], reduction: str) -> Call:
        self._numbers[group] += 1
        return Call(op, group, what, dtype, shape, reduction, self._numbers[group], call_site())

    @contextmanager
    def _naming(self, group: Group, call: Call) -> Iterator[None]:
        """Errors of the transport, told as what this rank was doing."""
        try:
            yield
        except DesyncError:
            raise
        except (RuntimeError, TimeoutError) as broken:
            self._raise_alarm()
            reason = str(broken).splitlines()[0] if str(broken) else type(broken).__name__
            raise DesyncError(
                f"rank {self.rank} was left alone in call {call.number} over {group}: {call}\n"
                f"  a rank of the group died, is elsewhere, or did not come in time: {reason}"
            ) from broken

    def _heard(self) -> str | None:
        """What another rank has said before it ended, as far as there is a side channel."""
        return None if self._channel is None else self._channel.heard()

    def _raise_alarm(self) -> None:
        """Raise that, as this rank's own error."""
        heard = self._heard()
        if heard is not None:
            raise DesyncError(heard)

    def _open_side_channel(self) -> SideChannel:
        """Sockets between processes, whose addresses travel once over the world; not counted as traffic."""
        listener = Listener(self.size)
        own = torch.frombuffer(bytearray(listener.address), dtype=torch.uint8).to(self.device)
        addresses, world = own, self.group("world")
        if world.size > 1:
            call = self._call("all_gather", "world", "addresses", dtype_name(own.dtype), tuple(own.shape), "")
            addresses = self._all_gather(own, world, call)
        rows = [row.numpy().tobytes() for row in addresses.cpu().view(-1, ADDRESS_BYTES)]
        return listener.connect(self.rank, rows, CONNECT_S)

    # What a way of communicating provides, for groups of two ranks and more.

    @abstractmethod
    def _all_gather(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor: ...

    @abstractmethod
    def _all_to_all(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor: ...

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor: ...

    @abstractmethod
    def _barrier(self, group: Group, call: Call) -> None: ...

    def _abandon(self, error: BaseException) -> None:
        """Leave after an error, without waiting for anybody; the others are told why, if there is a way."""
        if self._channel is not None:
            desync = isinstance(error, DesyncError)
            self._channel.alarm(str(error) if desync else f"rank {self.rank} raised {type(error).__name__}: {error}")


def check_world(topology: Topology, num_ranks: int, source: str) -> None:
    """Raise ConfigError unless as many ranks were started as the topology has."""
    if num_ranks != topology.world_size:
        sizes = " * ".join(f"{axis}={getattr(topology, axis)}" for axis in ("dp", "pp", "pcp", "tp"))
        raise ConfigError(
            f"{source} started {num_ranks} ranks, but {sizes} makes {topology.world_size}: "
            f"start {topology.world_size}, or change the sizes"
        )
