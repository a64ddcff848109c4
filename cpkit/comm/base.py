"""The interface between a rank program and the other ranks; groups and their order come from the topology.

What each operation does to dim 0, in a group of ranks a, b (in group order):

    op               a puts in   b puts in     a gets        b gets
    all_gather       a0 a1       b0 b1         a0 a1 b0 b1   a0 a1 b0 b1
    all_to_all       a0 a1       b0 b1         a0 b0         a1 b1
    reduce_scatter   a0 a1       b0 b1         a0+b0         a1+b1
    all_reduce       a0 a1       b0 b1         a0+b0 a1+b1   a0+b0 a1+b1
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from cpkit.comm.call import Call, Group, call_site
from cpkit.comm.contract import check_moves, check_reduction, check_what, dtype_name
from cpkit.comm.ledger import Issued, Ledger
from cpkit.comm.side_channel import SideChannel
from cpkit.comm.sockets import ADDRESS_BYTES, CONNECT_S, Listener
from cpkit.errors import ConfigError, DesyncError
from cpkit.topology import GROUPS, Topology

Move = Callable[[torch.Tensor, Group, Call], torch.Tensor]


class Comm(ABC):
    """One rank's place in the world and its way to the others.

    rank, size: in the world. topology: its groups. device: where tensors live. ledger: what was sent so far.

    Tensors are contiguous, of one shape and dtype on all ranks of a group; results are new tensors without gradient,
    and the input may be overwritten as soon as a call returns. `what` names the data, as in the plan's list.
    In a group of one rank every operation is a local copy. An empty tensor gives an empty result.
    Raises ConfigError for an unknown group, PlanError for a tensor that cannot travel, DesyncError where ranks
    disagree, die or do not come in time.
    """

    shares_process = False
    """Ranks are threads of one process."""

    def __init__(self, rank: int, topology: Topology, device: torch.device) -> None:
        self.rank = rank
        self.topology = topology
        self.device = device
        self.ledger = Ledger()
        self._groups = {name: _group(name, rank, topology) for name in GROUPS}
        self._numbers = dict.fromkeys(GROUPS, 0)
        self._channel: SideChannel | None = None

    @property
    def size(self) -> int:
        """Ranks in the world."""
        return self.topology.world_size

    def group(self, name: str) -> Group:
        """This rank's group of one kind; `name` is one of topology.GROUPS."""
        if name not in self._groups:
            raise ConfigError(f"no group {name!r}: the groups are {', '.join(GROUPS)}")
        return self._groups[name]

    def all_gather(self, tensor: torch.Tensor, group: str, *, what: str) -> torch.Tensor:
        """[n, ...] on each rank -> [group size * n, ...] on all: rank after rank, in group order."""
        return self._issue("all_gather", tensor, group, what, self._all_gather)

    def all_to_all(self, tensor: torch.Tensor, group: str, *, what: str) -> torch.Tensor:
        """[group size * n, ...]: part i goes to the group's i-th rank -> [group size * n, ...]: part i came from it."""
        return self._issue("all_to_all", tensor, group, what, self._all_to_all)

    def reduce_scatter(self, tensor: torch.Tensor, group: str, *, what: str) -> torch.Tensor:
        """[group size * n, ...] -> [n, ...]: the sum over the group of each rank's own part."""
        return self._issue("reduce_scatter", tensor, group, what, self._reduce_scatter, "sum")

    def all_reduce(self, tensor: torch.Tensor, group: str, *, what: str, reduction: str = "sum") -> torch.Tensor:
        """Any shape -> the same shape: sum, min or max over the group, meant for small things such as counts."""
        check_reduction(reduction)
        return self._issue("all_reduce", tensor, group, what, self._all_reduce, reduction)

    def barrier(self, group: str, *, what: str = "barrier") -> None:
        """Return once every rank of the group has come here."""
        check_what(what)
        members = self.group(group)
        if members.size > 1:
            self._barrier(members, self._call("barrier", group, what, "", (), ""))

    def side_channel(self) -> SideChannel:
        """The way to exchange a few bytes with all ranks beside the collectives; opened by the first call, which every
        rank makes at the same place of its program.
        """
        if self._channel is None:
            self._channel = self._open_side_channel()
        return self._channel

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

    def _issue(
        self, op: str, tensor: torch.Tensor, group: str, what: str, move: Move, reduction: str = ""
    ) -> torch.Tensor:
        """Check, count, and carry out one collective that moves data."""
        members = self.group(group)
        check_what(what)
        check_moves(op, tensor, members, self.device)
        tensor = tensor.detach()
        if members.size == 1:
            return tensor.clone()
        call = self._call(op, group, what, dtype_name(tensor), tuple(tensor.shape), reduction)
        if tensor.numel():
            self.ledger.add(Issued(op, group, what, call.dtype, tensor.numel(), tensor.nbytes, call.site))
        return move(tensor, members, call)

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
            call = self._call("all_gather", "world", "addresses", dtype_name(own), tuple(own.shape), "")
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


def _group(name: str, rank: int, topology: Topology) -> Group:
    ranks = topology.group_of(name, rank)
    return Group(name, ranks, ranks.index(rank))
