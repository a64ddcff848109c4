"""Ranks under mpirun: mpi4py over host memory.

Each group has a communicator whose ranks are in group order, so MPI lays results out as the topology says. Requests do
not block: each is watched against a deadline, since MPI itself would wait for a rank that never comes for ever.
"""

import time

import torch
from mpi4py import MPI

from cpkit.comm.call import Group
from cpkit.comm.host import LOOK_S, HostComm
from cpkit.comm.transport import check_world
from cpkit.errors import DesyncError, PlanError, print_error
from cpkit.topology import GROUPS, Topology

_MOST_BYTES = 2**31 - 1
"""MPI 3 counts in int32."""
_TOLD_S = 1.0
"""Between an error's line and the abort: mpirun passes on what ranks write a little later than what it says itself."""


class MpiComm(HostComm):
    """Ranks that MPI started; tensors on a GPU are copied to the host and back. An error aborts the job, told first."""

    def __init__(self, topology: Topology, device: torch.device, timeout_s: float) -> None:
        world = MPI.COMM_WORLD
        check_world(topology, world.Get_size(), "MPI")
        super().__init__(world.Get_rank(), topology, device)
        self._timeout_s = timeout_s
        self._by_name: dict[str, MPI.Intracomm] = {}
        for name in GROUPS:
            ranks = self.group(name).ranks
            if len(ranks) > 1:
                self._by_name[name] = world.Create_group(world.Get_group().Incl(list(ranks)))

    def close(self) -> None:
        """Free the communicators, once every rank has come here."""
        super().close()
        try:
            self._wait(MPI.COMM_WORLD.Ibarrier())
        except TimeoutError as late:
            raise DesyncError(f"rank {self.rank} has ended, and other ranks have not: {late}") from late
        for comm in self._by_name.values():
            comm.Free()

    def _abandon(self, error: BaseException) -> None:
        """End every rank of the job: one that has an error cannot let the others wait."""
        super()._abandon(error)
        print_error(f"rank {self.rank}: {type(error).__name__}: {error}")
        time.sleep(_TOLD_S)
        MPI.COMM_WORLD.Abort(1)

    def _gather_bytes(self, sent: torch.Tensor, group: Group) -> torch.Tensor:
        received = sent.new_empty(group.size, sent.numel())
        _check_count(sent.numel())
        self._wait(self._by_name[group.name].Iallgather(sent.numpy(), received.numpy()))
        return received

    def _exchange_bytes(self, sent: torch.Tensor, group: Group) -> torch.Tensor:
        received = torch.empty_like(sent)
        _check_count(sent.shape[1])
        self._wait(self._by_name[group.name].Ialltoall(sent.numpy(), received.numpy()))
        return received

    def _wait(self, request: MPI.Request) -> None:
        """Return when the request is done; TimeoutError after timeout_s. Sleeps, so that peers get the processor.

        Raises DesyncError when another rank says meanwhile why it ends.
        """
        start, pause, looked = time.monotonic(), 0.0, 0.0
        while not request.Test():
            waited = time.monotonic() - start
            if waited > self._timeout_s:
                raise TimeoutError(f"no answer for {self._timeout_s:g} s")
            if waited > looked + LOOK_S:
                looked = waited
                self._raise_alarm()
            time.sleep(pause)
            pause = min(max(2 * pause, 20e-6), 1e-3)


def _check_count(num_bytes: int) -> None:
    if num_bytes > _MOST_BYTES:
        raise PlanError(f"{num_bytes} bytes to one rank: MPI counts to {_MOST_BYTES}; send smaller chunks")
