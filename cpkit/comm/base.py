"""The interface between a rank program and the other ranks; groups and their order come from the topology.

What each operation does to dim 0, in a group of ranks a, b (in group order):

    op               a puts in   b puts in     a gets        b gets
    all_gather       a0 a1       b0 b1         a0 a1 b0 b1   a0 a1 b0 b1
    all_to_all       a0 a1       b0 b1         a0 b0         a1 b1
    reduce_scatter   a0 a1       b0 b1         a0+b0         a1+b1
    all_reduce       a0 a1       b0 b1         a0+b0 a1+b1   a0+b0 a1+b1
"""

from abc import ABC, abstractmethod

import torch

from cpkit.comm.call import Group
from cpkit.comm.contract import check_reduction
from cpkit.comm.ledger import Ledger
from cpkit.comm.side_channel import SideChannel
from cpkit.errors import ConfigError
from cpkit.topology import GROUPS, Topology


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
        return self.enter("all_gather", tensor, group, what)

    def all_to_all(self, tensor: torch.Tensor, group: str, *, what: str) -> torch.Tensor:
        """[group size * n, ...]: part i goes to the group's i-th rank -> [group size * n, ...]: part i came from it."""
        return self.enter("all_to_all", tensor, group, what)

    def reduce_scatter(self, tensor: torch.Tensor, group: str, *, what: str) -> torch.Tensor:
        """[group size * n, ...] -> [n, ...]: the sum over the group of each rank's own part."""
        return self.enter("reduce_scatter", tensor, group, what, "sum")

    def all_reduce(self, tensor: torch.Tensor, group: str, *, what: str, reduction: str = "sum") -> torch.Tensor:
        """Any shape -> the same shape: sum, min or max over the group, meant for small things such as counts."""
        check_reduction(reduction)
        return self.enter("all_reduce", tensor, group, what, reduction)

    @abstractmethod
    def enter(self, op: str, tensor: torch.Tensor, group: str, what: str, reduction: str = "") -> torch.Tensor:
        """One of the four operations above by its name: what they all call, and what a comm around a comm changes."""

    @abstractmethod
    def barrier(self, group: str, *, what: str = "barrier") -> None:
        """Return once every rank of the group has come here."""

    @abstractmethod
    def side_channel(self) -> SideChannel:
        """The way to exchange a few bytes with all ranks beside the collectives; opened by the first call, which every
        rank makes at the same place of its program.
        """


def _group(name: str, rank: int, topology: Topology) -> Group:
    ranks = topology.group_of(name, rank)
    return Group(name, ranks, ranks.index(rank))
