"""All ranks in one process: each is a thread, and they meet at every collective.

A meeting has a seat for each rank of the group. The last to come checks that all said the same and lets them go on;
each then makes its result from one copy of what all put in, in group order, so the order of threads plays no part.

Nothing waits for what cannot come. A run ends at once when ranks say different things, when a rank raises, when one
returns though others wait for it, or when every rank that is left waits for another; and when no rank enters a
collective for timeout_s. All ranks then raise one DesyncError that tells who is where.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from cpkit.comm.base import Comm
from cpkit.comm.call import Call, Group, call_site, check_agreement, lines_by_rank, spell_ranks
from cpkit.comm.contract import reduce_in_order
from cpkit.comm.patience import TIMEOUT_S
from cpkit.comm.side_channel import SideChannel
from cpkit.comm.transport import Transport
from cpkit.errors import ConfigError, DesyncError
from cpkit.topology import Topology

R = TypeVar("R")

STACK_BYTES = 8 << 20
"""Stack of a rank's thread: reserved, not used; 256 ranks reserve 2 GiB of addresses."""

GRACE_S = 1.0
"""How long a run that failed waits for ranks that are still computing."""


def run_ranks(
    topology: Topology,
    program: Callable[[Comm], R],
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = TIMEOUT_S,
) -> list[R]:
    """Run `program(comm)` as every rank of the world and return what each returned, in rank order.

    timeout_s: how long a rank may compute while all others wait. Inside, torch runs on one thread, as torchrun has it.
    Raises the error of the rank that failed first, with its rank as a note, or DesyncError.
    """
    world = _World(topology, timeout_s)
    comms = [_SimulatedComm(rank, world, torch.device(device)) for rank in range(topology.world_size)]
    results: dict[int, R] = {}

    def run(comm: Comm) -> None:
        try:
            results[comm.rank] = program(comm)
        except BaseException as error:
            world.leave(comm.rank, error)
        else:
            world.leave(comm.rank, None)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads take it over: 256 ranks must not start 256 pools of workers
    try:
        threads = _start([threading.Thread(target=run, args=(comm,), daemon=True) for comm in comms], world)
        world.ended.wait()
        deadline = time.monotonic() + GRACE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    except BaseException as error:  # the caller was interrupted, or a thread refused
        world.stop(f"the run was given up: {error!r}")
        raise
    finally:
        torch.set_num_threads(num_threads)
    world.raise_failure()
    return [results[rank] for rank in range(topology.world_size)]


def _start(threads: list[threading.Thread], world: "_World") -> list[threading.Thread]:
    before = threading.stack_size(STACK_BYTES)
    try:
        for rank, thread in enumerate(threads):
            try:
                thread.start()
            except RuntimeError as refused:
                raise ConfigError(
                    f"this machine refused thread {rank} of {len(threads)} ({refused}): simulate a smaller world, or "
                    "raise the limit on threads"
                ) from refused
    finally:
        threading.stack_size(before)
    return threads


class _SimulatedComm(Transport):
    shares_process = True

    def __init__(self, rank: int, world: "_World", device: torch.device) -> None:
        super().__init__(rank, world.topology, device)
        self._world = world

    def _all_gather(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return self._meet(tensor, group, call).flatten(0, 1).clone()

    def _all_to_all(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return self._own_parts(tensor, group, call).flatten(0, 1).clone()

    def _reduce_scatter(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return reduce_in_order(self._own_parts(tensor, group, call).unbind(), call.reduction)

    def _all_reduce(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        return reduce_in_order(self._meet(tensor, group, call).unbind(), call.reduction)

    def _barrier(self, group: Group, call: Call) -> None:
        self._world.meet(self.rank, group, call, torch.empty(0))

    def _open_side_channel(self) -> SideChannel:
        return _MeetingChannel(self, self._world)

    def _own_parts(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        """[group size, n, ...]: the part of each rank's [group size * n, ...] that is meant for this rank."""
        size = tensor.shape[0] // group.size
        return self._meet(tensor, group, call).narrow(1, group.place * size, size)

    def _meet(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        """[group size, *shape]: every rank's tensor in group order, to be read only, since all hold the same copy."""
        copy = tensor.clone()  # the program may reuse its buffer while others still read
        if copy.is_cuda:
            torch.cuda.current_stream(copy.device).synchronize()  # they may read on another stream
        return self._world.meet(self.rank, group, call, copy)


class _MeetingChannel(SideChannel):
    """Ranks leave their messages with the world and meet there."""

    def __init__(self, comm: Comm, world: "_World") -> None:
        self._comm = comm
        self._world = world
        self._number = 0

    def start(self, message: bytes) -> None:
        """Leave it for the others, who read it once all have met."""
        self._number += 1
        self._world.letters[self._number, self._comm.rank] = message

    def finish(self, limit_s: float, what: str) -> list[bytes]:
        """Meet, and read what all have left."""
        comm, letters = self._comm, self._world.letters
        call = Call("barrier", "world", "guard", "", (), "", self._number, call_site())
        self._world.meet(comm.rank, comm.group("world"), call, torch.empty(0), limit_s)
        letters.pop((self._number - 1, comm.rank), None)  # all have read it, or they would not have come
        return [letters[self._number, rank] for rank in range(comm.size)]


class _Meeting:
    """One collective of one group: who has come, with what. all: the tensors in group order, once everyone is here."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.calls: dict[int, Call] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.all = torch.empty(0)
        self.over = threading.Event()


class _World:
    """Where all ranks are. `failure` is what every rank raises from then on; `error` what a rank raised by itself."""

    def __init__(self, topology: Topology, timeout_s: float) -> None:
        self.topology = topology
        self.timeout_s = timeout_s
        self.ended = threading.Event()
        self.letters: dict[tuple[int, int], bytes] = {}  # by number of the exchange and rank
        self._lock = threading.Lock()
        self._open: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self._last_calls: dict[int, Call] = {}
        self._finished: set[int] = set()
        self._num_waiting = 0
        self._last_entry = time.monotonic()
        self._failure = ""
        self._error: BaseException | None = None

    def meet(
        self, rank: int, group: Group, call: Call, tensor: torch.Tensor, limit_s: float | None = None
    ) -> torch.Tensor:
        """Wait for the group: tensors [...] -> [group size, ...], what each of its ranks brought, in group order.

        limit_s: how long while no rank enters anything; None: timeout_s.
        """
        limit_s = self.timeout_s if limit_s is None else limit_s
        with self._lock:
            self._raise_if_failed()
            meeting = self._take_seat(rank, group, call, tensor)
            last = len(meeting.calls) == group.size
        if last:
            self._complete(meeting)
        patience = limit_s
        while not meeting.over.wait(patience):
            with self._lock:
                patience = self._last_entry + limit_s - time.monotonic()
                if patience <= 0:
                    self._fail(self._where(f"no rank entered a collective for {limit_s:g} s"))
                    break
        self._raise_if_failed()
        return meeting.all

    def leave(self, rank: int, error: BaseException | None) -> None:
        """A rank's program has ended, with or without an error."""
        with self._lock:
            self._finished.add(rank)
            if error is not None and not self._failure:
                self._error = error
                self._fail(f"rank {rank} raised {type(error).__name__}: {error}")
            elif any(rank in meeting.group.ranks for meeting in self._open.values()):
                self._fail(self._where(f"rank {rank} returned while others wait for it"))
            else:
                self._check_deadlock()
            if len(self._finished) == self.topology.world_size:
                self.ended.set()

    def stop(self, reason: str) -> None:
        """Release every rank."""
        with self._lock:
            self._fail(reason)

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        with self._lock:
            if isinstance(self._error, Exception):
                self._error.add_note(f"{self._failure}\nthe other {self.topology.world_size - 1} ranks were released")
                raise self._error
            if self._failure:
                # a rank's SystemExit must not end the caller with that rank's exit code, which may be 0
                raise DesyncError(self._failure) from self._error

    def _take_seat(self, rank: int, group: Group, call: Call, tensor: torch.Tensor) -> _Meeting:
        self._last_entry = time.monotonic()
        self._last_calls[rank] = call
        key = group.name, group.ranks
        meeting = self._open.get(key) or self._open.setdefault(key, _Meeting(group))
        meeting.calls[rank] = call
        meeting.tensors[rank] = tensor
        if len(meeting.calls) == group.size:
            return meeting
        self._num_waiting += 1
        gone = self._finished.intersection(group.ranks)
        if gone:
            self._fail(self._where(f"{spell_ranks(sorted(gone))} returned while others wait"))
        self._check_deadlock()
        return meeting

    def _complete(self, meeting: _Meeting) -> None:
        """Everyone is here: let the ranks go on, if all said the same."""
        try:
            check_agreement(meeting.calls, meeting.group)
            meeting.all = torch.stack([meeting.tensors.pop(rank) for rank in meeting.group.ranks])
        except DesyncError as disagreement:
            self.stop(str(disagreement))
            return
        with self._lock:
            del self._open[meeting.group.name, meeting.group.ranks]
            self._num_waiting -= meeting.group.size - 1
        meeting.over.set()

    def _check_deadlock(self) -> None:
        if self._open and self._num_waiting + len(self._finished) == self.topology.world_size:
            self._fail(self._where("no rank can go on: each waits for one that is elsewhere"))

    def _fail(self, text: str) -> None:
        """End the run and release every rank; of several failures the first counts."""
        self._failure = self._failure or text
        self.ended.set()
        for meeting in self._open.values():
            meeting.over.set()

    def _where(self, title: str) -> str:
        """The title, then who waits where, and where those were last seen that are waited for and wait nowhere."""
        waiting, wanted = {}, set[int]()
        for meeting in self._open.values():
            wanted.update(meeting.group.ranks)
            for rank, call in meeting.calls.items():
                waiting[rank] = f"waiting in call {call.number} over {meeting.group}: {call}"
        absent = {rank: self._last_seen(rank) for rank in wanted - waiting.keys()}
        return "\n".join([title, *lines_by_rank(absent), *lines_by_rank(waiting)])

    def _last_seen(self, rank: int) -> str:
        state = "returned" if rank in self._finished else "did not come"
        call = self._last_calls.get(rank)
        if call is None:
            return f"{state}, and entered no collective before"
        return f"{state}, last seen in call {call.number} over {call.group}: {call}"

    def _raise_if_failed(self) -> None:
        if self._failure:
            raise DesyncError(self._failure)
