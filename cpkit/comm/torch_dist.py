"""Ranks under torch.distributed: gloo between CPUs, NCCL between GPUs.

torch sorts the ranks of a group, whatever order new_group is given, and all its collectives follow that order. Ours is
the topology's, so every result is put in it here. tp=2, pcp=2, dcp=4:

    ours      0 2 1 3
    torch's   0 1 2 3
    places    0 2 1 3        where each of torch's ranks stands in ours: rank 1 in place 2

Every group of every kind is created when the comm is, in one order on all ranks: kinds as in topology.GROUPS, then the
groups of a kind as the topology lists them. Groups of one rank need none.
"""

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from cpkit.comm.base import Comm
from cpkit.comm.call import Call, Group
from cpkit.comm.host import LOOK_S, HostComm
from cpkit.comm.launcher import Launch
from cpkit.comm.transport import Transport, check_world
from cpkit.comm.watch import Watch
from cpkit.errors import ConfigError, DesyncError, PlanError
from cpkit.topology import GROUPS, Topology

TORCH_LATER_S = 60.0
LEAVE_S = 10.0
"""How long a rank that has failed may take to end, before it is ended."""

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def open_job(launch: Launch, device: torch.device, timeout_s: float) -> None:
    """Join the job's default process group: NCCL for a CUDA device, else gloo. Raises ConfigError, one line a cause."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set: torchrun sets it; elsewhere export the address and port of rank 0")
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            _backend(device),
            init_method="env://",
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=_torch_timeout(device, timeout_s),
            device_id=device if cuda else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as refused:
        reason = str(refused).splitlines()[0]
        where = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
        if "EADDRINUSE" in str(refused) or "in use" in reason:
            raise ConfigError(f"{where}: the port is taken; set MASTER_PORT to a free one") from refused
        raise ConfigError(f"rank {launch.rank} could not join the job at {where}: {reason}") from refused


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _torch_timeout(device: torch.device, timeout_s: float) -> timedelta:
    """How long torch itself waits. On a GPU our own watch comes first, since torch's kills the rank without a word."""
    return timedelta(seconds=timeout_s + (TORCH_LATER_S if device.type == "cuda" else 0))


def close_job() -> None:
    """Leave the default process group, and with it all others, once every rank has come here."""
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """torch's process group behind one of ours, whose ranks stand in another order.

    places: [size], where torch's ranks of it, in torch's order, stand in ours.
    """

    handle: dist.ProcessGroup
    places: list[int]

    @property
    def in_order(self) -> bool:
        """Ours is torch's order: what all ranks sent lands in its place, where torch else copies it once more."""
        return self.places == sorted(self.places)

    def rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """[size, ...] in our order -> its rows in torch's order, each a view."""
        return [tensor[place] for place in self.places]

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """[size * n, ...] in our order -> its parts in torch's order, each a view."""
        return self.rows(tensor.view(len(self.places), -1, *tensor.shape[1:]))


class _TorchGroups:
    """This rank's process groups by kind."""

    def __init__(self, comm: Comm, timeout_s: float) -> None:
        check_world(comm.topology, dist.get_world_size(), "torch.distributed")
        self._by_name: dict[str, TorchGroup] = {}
        backend, timeout = _backend(comm.device), _torch_timeout(comm.device, timeout_s)
        self._rank = comm.rank
        for name in GROUPS:
            for ranks in comm.topology.groups(name):
                if len(ranks) == 1:
                    continue
                # every rank creates every group, its own or not, as torch asks
                handle = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)
                if comm.rank in ranks:
                    places = [ranks.index(rank) for rank in dist.get_process_group_ranks(handle)]
                    self._by_name[name] = TorchGroup(handle, places)

    def __getitem__(self, group: Group) -> TorchGroup:
        return self._by_name[group.name]

    def close(self, with_job: bool) -> None:
        """Destroy the groups, once every rank has come here: a rank that leaves early breaks its peers' connections."""
        try:
            if with_job:
                close_job()
                return
            dist.barrier()
        except RuntimeError as broken:
            reason = str(broken).splitlines()[0]
            raise DesyncError(f"rank {self._rank} has ended, and other ranks have not: {reason}") from broken
        for group in self._by_name.values():
            dist.destroy_process_group(group.handle)


class GlooComm(HostComm):
    """Ranks that exchange host memory through gloo, which moves bytes only: it lacks dtypes and an order of sums."""

    def __init__(self, topology: Topology, timeout_s: float, *, owns_job: bool = False) -> None:
        super().__init__(dist.get_rank(), topology, torch.device("cpu"))
        self._torch_groups = _TorchGroups(self, timeout_s)
        self._owns_job = owns_job

    def close(self) -> None:
        """Destroy the groups, and leave the job if this comm opened it."""
        super().close()
        self._torch_groups.close(self._owns_job)

    def _gather_bytes(self, sent: torch.Tensor, group: Group) -> torch.Tensor:
        torch_group = self._torch_groups[group]
        received = sent.new_empty(group.size, sent.numel())
        self._wait(dist.all_gather(torch_group.rows(received), sent, group=torch_group.handle, async_op=True))
        return received

    def _exchange_bytes(self, sent: torch.Tensor, group: Group) -> torch.Tensor:
        torch_group = self._torch_groups[group]
        arrived = torch.empty_like(sent)
        # gloo exchanges one tensor only, so the rows are put into torch's order and back
        rows = torch.stack(torch_group.rows(sent))
        self._wait(dist.all_to_all_single(arrived, rows, group=torch_group.handle, async_op=True))
        received = torch.empty_like(sent)
        received[torch_group.places] = arrived
        return received

    def _wait(self, work: dist.Work | None) -> None:
        """Return when it is done; raises what gloo raises, or DesyncError when another rank says why it ends."""
        assert work is not None, "this rank is in the group"
        while True:
            was_done = work.is_completed()  # asked first: it may get done just after a wait's time was up
            try:
                work.wait(timedelta(seconds=LOOK_S))
            except RuntimeError:
                if was_done:
                    raise
                self._raise_alarm()
            else:
                return


class NcclComm(Transport):
    """Ranks that own a GPU each. Calls return when the work is on the current stream, as torch's do.

    No tickets are exchanged here, which would stop the stream at every call: a guard compares what ranks have planned
    before a step, over a side channel. A rank that does not come is waited for timeout_s: then a watch tells the call,
    here and to the other ranks, and ends the process, since the program may be inside the CUDA driver.
    Sums are NCCL's own: of two ranks, or of exact data, the simulation's bits; else float additions follow the order of
    its rings and trees, so the last bits may differ, and bfloat16 and float16 are rounded on the way.
    """

    def __init__(self, topology: Topology, device: torch.device, timeout_s: float, *, owns_job: bool = False) -> None:
        super().__init__(dist.get_rank(), topology, device)
        self._torch_groups = _TorchGroups(self, timeout_s)
        self._owns_job = owns_job
        self._watch = Watch(self.rank, device, timeout_s, self._heard, self._pass_on)

    def close(self) -> None:
        """Destroy the groups, and leave the job if this comm opened it."""
        self._watch.stop()
        super().close()
        self._torch_groups.close(self._owns_job)

    def torch_group(self, group: Group) -> TorchGroup:
        """Of two ranks and more; for what torch does with a group besides collectives (comm/symmetric.py)."""
        return self._torch_groups[group]

    def _pass_on(self, text: str) -> None:
        if self._channel is not None:
            self._channel.alarm(text)

    def _abandon(self, error: BaseException) -> None:
        """Tell the others, and see to it that this process ends, which a kernel that waits for them may prevent."""
        self._watch.stop()
        super()._abandon(error)
        if self.device.type == "cuda":
            faulthandler.dump_traceback_later(LEAVE_S, exit=True)

    @contextmanager
    def _watched(self, group: Group, call: Call) -> Iterator[None]:
        """One collective, told as what this rank was doing if it fails, and watched if it is not done in time."""
        if self._watch.alarm is not None:
            raise DesyncError(self._watch.alarm)
        with self._naming(group, call):
            self._watch.enter(call, group)
            try:
                yield
            except BaseException:
                self._watch.failed()
                raise
            self._watch.leave()

    def _all_gather(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        torch_group = self._torch_groups[group]
        received = tensor.new_empty(group.size, *tensor.shape)
        if tensor.numel():
            with self._watched(group, call):
                if torch_group.in_order:
                    dist.all_gather_into_tensor(_plain(received), _plain(tensor), group=torch_group.handle)
                else:
                    rows = [_plain(row) for row in torch_group.rows(received)]
                    dist.all_gather(rows, _plain(tensor), group=torch_group.handle)
        return received.flatten(0, 1)

    def _all_to_all(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        torch_group = self._torch_groups[group]
        received = torch.empty_like(tensor)
        if tensor.numel():
            sent, into = ([_plain(part) for part in torch_group.parts(whole)] for whole in (tensor, received))
            with self._watched(group, call):
                dist.all_to_all(into, sent, group=torch_group.handle)
        return received

    def _reduce_scatter(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        torch_group = self._torch_groups[group]
        received = tensor.new_empty(tensor.shape[0] // group.size, *tensor.shape[1:])
        if tensor.numel():
            _check_nccl_sums(tensor, call)
            with self._watched(group, call):
                dist.reduce_scatter(received, torch_group.parts(tensor), group=torch_group.handle)
        return received

    def _all_reduce(self, tensor: torch.Tensor, group: Group, call: Call) -> torch.Tensor:
        total = tensor.clone()
        if tensor.numel():
            _check_nccl_sums(tensor, call)
            with self._watched(group, call):
                dist.all_reduce(total, _REDUCE_OPS[call.reduction], group=self._torch_groups[group].handle)
        return total

    def _barrier(self, group: Group, call: Call) -> None:
        with self._watched(group, call):
            dist.barrier(self._torch_groups[group].handle, device_ids=[self.device.index])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8 over the same memory: NCCL lacks some dtypes, and what moves needs none."""
    return tensor.view(-1).view(torch.uint8)


def _check_nccl_sums(tensor: torch.Tensor, call: Call) -> None:
    if tensor.dtype == torch.int16:
        raise PlanError(f"{call}: NCCL does not add int16; use int32")
