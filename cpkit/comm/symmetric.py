"""Memory that the ranks of a group read in each other's GPUs: one-sided, over NVLink, without a collective.

Each rank writes its own memory, all meet, then each reads what it wants from the others, in the order it wants it:

    rank 0    write own ── meet ── read 0, 1        write own ── meet ── ...
    rank 1    write own ──── meet ── read 0, 1      write own ── meet ── ...

A meeting (kernels/meet.py) is on the device, so nothing waits on the host. Memory may be written again once the next
meeting is over: whoever came there has read before. So two buffers in turn need one meeting an exchange.

A rank that never comes is missed after the time limit: the device goes on, and `check` raises DesyncError; what was
read meanwhile must not be used. No NVLink multicast takes part, and none is set up.
"""

import os
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from cpkit.comm.call import Call
from cpkit.comm.contract import check_what
from cpkit.comm.torch_dist import NcclComm
from cpkit.errors import ConfigError, DesyncError
from cpkit.kernels.meet import MAX_RANKS, meet


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """own: [bytes] uint8, this rank's. addresses: [group size] int64 on the device, of all ranks', in group order."""

    own: torch.Tensor
    addresses: torch.Tensor
    handle: Any  # torch's; the others' memory stays mapped as long as it lives


class PeerGroup:
    """This rank among the ranks of a group that read each other's memory; made by all of them at the same place.

    timeout_s: how long a rank waits for the others of a meeting. Raises ConfigError where the ranks cannot reach each
    other's memory.
    """

    def __init__(self, comm: NcclComm, group: str, *, timeout_s: float) -> None:
        members = comm.group(group)
        if not 2 <= members.size <= MAX_RANKS:
            raise ConfigError(f"{members} has {members.size} ranks: 2 to {MAX_RANKS} can read each other's memory")
        self._comm, self._members, self._timeout_s = comm, members, timeout_s
        self._state = torch.zeros(2, dtype=torch.int32, device=comm.device)
        self._reports: deque[tuple[torch.cuda.Event, torch.Tensor, Call]] = deque()
        self._spare: list[tuple[torch.cuda.Event, torch.Tensor]] = []
        self._last: Call | None = None
        self._failure = ""
        self._pads = self.allocate(4 * members.size)
        self._own_pad = self._pads.own.view(torch.int32)
        self._own_pad.zero_()
        torch.cuda.current_stream(comm.device).synchronize()
        comm.barrier(group, what="peer_memory")  # no pad is written before all are zero

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._members.size

    def allocate(self, num_bytes: int) -> PeerMemory:
        """As much memory on every rank; all of them call it at the same place, with the same number."""
        # Without it torch sets up multicast for every allocation where the hardware has it.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        torch_group = self._comm.torch_group(self._members)
        try:
            own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._comm.device)
            shared = symmetric_memory.rendezvous(own, torch_group.handle)
        except dist.DistError as alone:
            raise DesyncError(
                f"rank {self._comm.rank} was left alone while {self._members} shared memory: {_first_line(alone)}"
            ) from alone
        except RuntimeError as refused:
            raise ConfigError(
                f"{self._members} cannot share GPU memory ({_first_line(refused)}): it takes GPUs of one host that "
                "reach each other; gather by collectives instead"
            ) from refused
        addresses = [0] * self.size
        for rank, place in enumerate(torch_group.places):
            addresses[place] = shared.get_buffer(rank, (num_bytes,), torch.uint8).data_ptr()
        return PeerMemory(own, torch.tensor(addresses, device=self._comm.device), shared)

    def meet(self, num_bytes: int, *, what: str) -> None:
        """Put a meeting on the current stream, which lets the others read num_bytes that this rank wrote before.

        Counted as the all-gather that it stands for. Raises DesyncError if an earlier meeting is known to have failed.
        """
        check_what(what)
        captured = torch.cuda.is_current_stream_capturing()
        if not captured:
            self.check(wait=False)
        call = self._comm.announce("all_gather", self._members.name, what, torch.uint8, (num_bytes,))
        meet(self._pads.addresses, self._own_pad, self._state, place=self._members.place, timeout_s=self._timeout_s)
        self._last = call
        if not captured:
            self._report(call)

    def check(self, *, wait: bool = True) -> None:
        """Raise DesyncError if a rank was missed.

        wait: look at every meeting so far, those of graphs replayed on the current stream too; all of them end in time.
        Else look at those known to be over.
        """
        if wait and self._last is not None:
            self._report(self._last)
        while self._reports and not self._failure:
            done, state, call = self._reports[0]
            if not wait and not done.query():  # type: ignore[no-untyped-call]
                return
            done.synchronize()
            missed = int(state[1])
            if missed:
                self._failure = (
                    f"rank {self._comm.rank} waited {self._timeout_s:g} s for rank {self._members.ranks[missed - 1]} "
                    f"in call {call.number} over {self._members}: {call}\n"
                    "  it died, is elsewhere, or did not come in time"
                )
            self._reports.popleft()
            self._spare.append((done, state))
        if self._failure:
            raise DesyncError(self._failure)

    def _report(self, call: Call) -> None:
        """Copy how the meeting went to the host, to be looked at once it is there."""
        if not self._spare:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._spare.append((event, torch.empty(2, dtype=torch.int32, pin_memory=True)))
        done, state = self._spare.pop()
        state.copy_(self._state, non_blocking=True)
        done.record()
        self._reports.append((done, state, call))


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
