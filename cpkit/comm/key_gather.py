"""Index keys of a workspace from all DCP shards: by a collective, or read where they lie.

    collective    paged cache ─► packed shard ─► all-gather ─► shards              any comm
                                                           └─► token order         where no kernel reads shards
    symmetric     paged cache ─► shared buffer ─► meeting ─► token order           GPUs that reach each other's memory

Both send the same bytes, values and scales of a shard in one piece, and count them as the same all-gather. A gather is
started and waited for, so that the next workspace fills while the caller scores this one:

    side stream    gather 0 │ gather 1 │ gather 2 │
    caller                    score 0  │ score 1  │ score 2

Keys in token order have two workspaces in turn, whatever the host has queued: gather 2 fills that of gather 0, behind
the work that reads it. Shards are the memory that the all-gather filled: at most three, that of gather 0 while the
caller holds it. On a CPU a gather is over when start returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from cpkit.comm.base import Comm
from cpkit.comm.symmetric import PeerGroup
from cpkit.comm.torch_dist import NcclComm
from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.gather_keys import gather_keys, keys_out, pull_keys, split_planes
from cpkit.kernels.key_shards import IndexKeys, KeyShards, WorkspaceKeys, empty_shard, packed_bytes
from cpkit.kernels.mqa_operands import reads_shards
from cpkit.kernels.table_keys import KeyTable, pack_table_keys, table_keys

GATHERS = ("collective", "symmetric")
WHAT = "index_keys"


@dataclass(frozen=True, slots=True, eq=False)
class PendingKeys:
    """A gather under way; done: None where it is over already."""

    keys: WorkspaceKeys
    done: torch.cuda.Event | None

    def wait(self) -> WorkspaceKeys:
        """The keys in token order, or shards to be read in it, for work on the current stream; the host does not wait.

        A gather that reads shards as they lie gives shards, if the kernels of its backend take them.
        """
        if self.done is None:
            return self.keys
        if isinstance(self.keys, KeyShards):
            # The side stream, whose memory this is, waits for the caller's stream before it fills any again.
            torch.cuda.current_stream(self.keys.packed.device).wait_event(self.done)
            return self.keys
        stream = torch.cuda.current_stream(self.keys[0].device)
        stream.wait_event(self.done)
        for part in self.keys:
            part.record_stream(stream)
        return self.keys


class KeyGather(ABC):
    """Gathers of one rank over its DCP group, one after another, in the same order on all its ranks.

    max_keys: the most that one rank contributes to a workspace.
    """

    def __init__(self, comm: Comm, dim: int, max_keys: int) -> None:
        self._comm, self._dim, self._max_keys = comm, dim, max_keys
        self._ranks = comm.group("dcp").size
        self._workspaces = [keys_out(None, 0, dim, comm.device) for _ in range(2)]
        self._stream: torch.cuda.Stream | None = None
        # threads of one process exchange tensors on the one stream that they share
        if comm.device.type == "cuda" and not comm.shares_process:
            # short, and the next workspace waits for it: before what the caller has queued
            self._stream = torch.cuda.Stream(comm.device, priority=-1)  # type: ignore[no-untyped-call]

    def start(self, cache: torch.Tensor, table: KeyTable, *, interleave: int) -> PendingKeys:
        """Begin to gather the keys of a workspace: table.num_keys of every rank, the tables as in table_keys.py.

        The cache must not change until the gather is waited for. The keys stay until the gather after the next one is
        started; work that reads them is on the current stream by then. interleave in keys. Raises DesyncError if an
        earlier gather is known to have failed, and PlanError for more keys than max_keys.
        """
        if table.num_keys > self._max_keys:
            raise PlanError(f"{table.num_keys} keys of a rank in buffers for {self._max_keys}: size them by the budget")
        if self._stream is None:
            return PendingKeys(self._gather(cache, table, interleave), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._comm.device))
        with torch.cuda.stream(self._stream):
            keys = self._gather(cache, table, interleave)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        for part in (cache, table.local_start, table.block_tables, table.key_lens):
            part.record_stream(self._stream)
        return PendingKeys(keys, done)

    def check(self) -> None:  # noqa: B027 - a collective tells of its failure itself
        """Raise DesyncError if a gather so far has failed, once all are over; before results are given to anybody."""

    @abstractmethod
    def _gather(self, cache: torch.Tensor, table: KeyTable, interleave: int) -> WorkspaceKeys: ...

    def _next_workspace(self, keys_per_rank: int) -> IndexKeys:
        """Room for the keys of all ranks in the workspace whose turn it is; it grows to the largest so far."""
        self._workspaces.reverse()
        num_keys = keys_per_rank * self._ranks
        if len(self._workspaces[0][1]) < num_keys:
            self._workspaces[0] = keys_out(None, 0, self._dim, self._comm.device)  # gone before the larger one is made
            self._workspaces[0] = keys_out(None, num_keys, self._dim, self._comm.device)
        values, scales = self._workspaces[0]
        return values[:num_keys], scales[:num_keys]


class CollectiveGather(KeyGather):
    """One all-gather of packed shards; what no kernel of the backend reads so is put into token order in one launch.

    backend: torch or triton.
    """

    def __init__(self, comm: Comm, dim: int, max_keys: int, backend: str) -> None:
        super().__init__(comm, dim, max_keys)
        self._backend = backend

    def _gather(self, cache: torch.Tensor, table: KeyTable, interleave: int) -> WorkspaceKeys:
        shard = empty_shard(self._comm.group("dcp").place, table.num_keys, self._dim, cache.device)
        pack_table_keys(cache, table, shard, backend=self._backend)
        gathered = self._comm.all_gather(shard.packed, "dcp", what=WHAT).view(self._ranks, len(shard.packed))
        shards = KeyShards(gathered, table.local_start, self._dim, interleave)
        if self._backend == "triton" and reads_shards(shards):
            return shards
        return gather_keys(shards, out=self._next_workspace(table.num_keys), backend=self._backend)


class SymmetricGather(KeyGather):
    """Each rank packs its shard into a shared buffer of max_keys keys, and all read all; two buffers in turn."""

    def __init__(self, comm: NcclComm, dim: int, max_keys: int, timeout_s: float) -> None:
        super().__init__(comm, dim, max_keys)
        self._peers = PeerGroup(comm, "dcp", timeout_s=timeout_s)
        self._buffers = [self._peers.allocate(packed_bytes(max_keys, dim)) for _ in range(2)]

    def check(self) -> None:
        """Raise DesyncError if a rank was missed, once all gathers so far are over."""
        with torch.cuda.stream(self._stream):
            self._peers.check()

    def _gather(self, cache: torch.Tensor, table: KeyTable, interleave: int) -> IndexKeys:
        out = self._next_workspace(table.num_keys)
        if not table.num_keys:
            return out
        shard = self._buffers[0].own[: packed_bytes(table.num_keys, self._dim)]
        parts = split_planes(shard, table.num_keys, self._dim)
        table_keys(cache, table, self._dim, out=parts, backend="triton")
        self._peers.meet(len(shard), what=WHAT)
        pull_keys(
            self._buffers[0].addresses, table.local_start, table.num_keys, self._dim, interleave=interleave, out=out
        )
        self._buffers.reverse()
        return out


def check_gather(gather: str) -> None:
    """Raise ConfigError unless there is a gather of this name."""
    if gather not in GATHERS:
        raise ConfigError(f"gather {gather!r}: use one of {', '.join(GATHERS)}")


def make_key_gather(comm: Comm, gather: str, *, dim: int, max_keys: int, backend: str, timeout_s: float) -> KeyGather:
    """The gather that was named, one of GATHERS; made by all ranks of the DCP group at the same place.

    max_keys: the most that one rank contributes to a workspace. timeout_s: how long a rank waits for the others, where
    the comm itself does not limit it. Raises ConfigError for another name, or a comm that cannot.
    """
    check_gather(gather)
    if gather == "collective":
        return CollectiveGather(comm, dim, max_keys, backend)
    if not isinstance(comm, NcclComm):
        raise ConfigError(
            "gather symmetric: ranks read each other's GPU memory, so it takes comm torch on device cuda; "
            "here use gather collective"
        )
    return SymmetricGather(comm, dim, max_keys, timeout_s)


def in_turn(
    gather: KeyGather, workspaces: Iterable[tuple[torch.Tensor, KeyTable]], *, interleave: int
) -> Iterator[WorkspaceKeys]:
    """The keys of each workspace (cache and table) in turn, the gather of the next under way meanwhile.

    Whoever asks for the next has put all work that reads the last on the current stream: its memory is filled anew.
    """
    ahead: PendingKeys | None = None
    for cache, table in workspaces:
        now, ahead = ahead, gather.start(cache, table, interleave=interleave)
        if now is not None:
            yield now.wait()
    if ahead is not None:
        yield ahead.wait()
