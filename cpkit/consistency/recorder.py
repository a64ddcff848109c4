"""Record every collective that a process enters, before it can block: one JSONL file a rank.

    {"format": "cpkit-record-1", "run": "8f3a", "rank": 1, "world": 2, "pid": 71, "host": "a", "torch": "2.13.0"}
    {"group": 0, "name": "0", "ranks": [0, 1]}
    {"group": 0, "seq": 1, "step": 0, "op": "all_reduce", "dtypes": ["float32"], "shapes": [[4, 2]], "site": "a.py:31"}
    {"end": 1}

`group` numbers the groups of this file in the order of their first use, `seq` the calls over a group, from 1. Rooted
calls name the "root" in the group, point-to-point calls the "peer"; an all-to-all with split sizes is "uneven". The
last line is there if the process ended by itself. Collectives that C++ enters alone (DDP's buckets, functional
collectives) and those of other libraries are not seen.
"""

import atexit
import json
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from cpkit.consistency.call_site import Sites
from cpkit.consistency.log_file import LogFile
from cpkit.consistency.operations import METHODS, Method
from cpkit.errors import ConfigError, InputError

FORMAT = "cpkit-record-1"
FOLDER_VARIABLE = "CPKIT_RECORD"
RUN_VARIABLE = "CPKIT_RECORD_RUN"
_MOST_REMEMBERED = 10_000
_LISTS = (list, tuple)  # a union would be made anew at every call

_active: "Recorder | None" = None


@contextmanager
def record(folder: Path | str) -> Iterator[Path]:
    """Record the collectives of this process into a folder, which is made, until the end of the block.

    Raises ConfigError when this process records already, InputError when the folder cannot be written.
    """
    recorder = start(folder)
    try:
        yield recorder.folder
    finally:
        stop()


def mark_step(step: int) -> None:
    """Say which step the calls from here on belong to; nothing happens in a process that does not record."""
    if _active is not None:
        _active.step = step


def start(folder: Path | str) -> "Recorder":
    """Record from here on; ends by stop, or with the process."""
    global _active
    if _active is not None:
        raise ConfigError(f"this process records into {_active.folder} already: leave one of the two out")
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    _active = Recorder(path)
    _active.patch()
    atexit.register(stop)
    return _active


def stop() -> None:
    """Take the recorder out of torch again and end its log."""
    global _active
    if _active is not None:
        recorder, _active = _active, None
        recorder.unpatch()
        recorder.close()
        atexit.unregister(stop)


def opened() -> None:
    """Begin the log of a process whose world has just been made, so that a rank without any call has one too."""
    if _active is not None:
        _active.begin()


def _forked() -> None:
    """In a child: its parent goes on with the log."""
    if _active is not None:
        _active.forget()
        _active.lock = threading.RLock()  # another thread of the parent may have held the old one


os.register_at_fork(after_in_child=_forked)


class Recorder:
    """What one process has recorded so far."""

    def __init__(self, folder: Path) -> None:
        import torch.distributed.distributed_c10d as dist

        self.folder = folder
        self.step = 0
        self._dist = dist
        self._kind = dist.ProcessGroup
        self._originals: dict[str, Any] = {}
        self._sites = Sites(str(Path(dist.__file__).parents[1]))
        self.lock = threading.RLock()
        self._log: LogFile | None = None
        self._groups: dict[int, list[Any]] = {}  # id of a process group: [weak reference, number, calls so far]
        self._num_groups = 0
        self._tails: dict[Any, bytes] = {}

    def patch(self) -> None:
        """Put a recording method before each of ProcessGroup's."""
        for name, method in METHODS.items():
            original = getattr(self._kind, name, None)
            if original is not None:
                self._originals[name] = self._kind.__dict__[name]  # the descriptor, which binds; `original` does not
                setattr(self._kind, name, _recording(original, method))
        if self._dist.is_initialized():
            self.begin()

    def unpatch(self) -> None:
        """Give ProcessGroup its own methods back."""
        for name, original in self._originals.items():
            setattr(self._kind, name, original)

    def failed(self, error: Exception) -> None:
        """Say that the recorder itself broke, and stop it rather than the program."""
        print(f"cpkit record: stopped, the log of this process is not complete: {error}", file=sys.stderr)
        self.forget()
        stop()

    def enter(self, group: Any, method: Method, args: tuple[Any, ...], named: dict[str, Any], frame: FrameType) -> None:
        """Write down one call, before it is made."""
        known = self._groups.get(id(group))
        if known is None or known[0]() is not group:
            known = self._new_group(group)
        known[2] += 1
        tensors = _tensors(args, named, method)
        extra = _extra(args, named, method) if method.has_extra else None
        key: tuple[Any, ...] = (method.op, self._sites.place(frame), extra)
        for tensor in tensors:
            key += (tensor.dtype, tensor.shape)
        tail = self._tails.get(key)
        if tail is None:
            if len(self._tails) >= _MOST_REMEMBERED:
                self._tails.clear()
            tail = self._tails[key] = _tail(method.op, tensors, extra, self._sites.spell(frame))
        assert self._log is not None, "a known group has been written down"
        self._log.write(b'{"group": %d, "seq": %d, "step": %d, %b' % (known[1], known[2], self.step, tail))

    def begin(self) -> None:
        """Open the log before the first call, so that a rank without calls has one."""
        try:
            with self.lock:
                self._open()
        except Exception as error:
            self.failed(error)

    def _open(self) -> None:
        if self._log is not None:
            return
        joined = self._dist.is_initialized()
        rank = self._dist.get_rank() if joined else int(os.environ.get("RANK", "0"))
        world = self._dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
        name = f"rank{rank:05}-{socket.gethostname()}-{os.getpid()}-{os.urandom(2).hex()}.jsonl"
        self._log = LogFile(self.folder / name)
        self._write(
            {
                "format": FORMAT,
                "run": run_name(),
                "rank": rank,
                "world": world,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "torch": sys.modules["torch"].__version__,
            }
        )

    def close(self) -> None:
        """End the log."""
        with self.lock:
            if self._log is not None:
                self._write({"end": 1})
                self._log.close()
                self._log = None

    def forget(self) -> None:
        """Leave the log as it is, without an end."""
        if self._log is not None:
            self._log.abandon()
        self._log = None
        self._groups.clear()
        self._num_groups = 0

    def _new_group(self, group: Any) -> list[Any]:
        self._open()
        try:
            ranks: list[int] | None = list(self._dist.get_process_group_ranks(group))
        except (KeyError, ValueError, RuntimeError):  # made outside torch.distributed's own list of groups
            ranks = None
        known = self._groups[id(group)] = [weakref.ref(group), self._num_groups, 0]
        self._num_groups += 1
        self._write({"group": known[1], "name": group.group_name, "ranks": ranks})
        return known

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._log is not None
        self._log.write(json.dumps(entry).encode() + b"\n")


def run_name() -> str:
    """The same on all ranks of one start of a job, and different for another start."""
    parts = [os.environ.get(name, "") for name in (RUN_VARIABLE, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    return "/".join(part for part in parts if part) or f"port {os.environ.get('MASTER_PORT', 'unknown')}"


def _recording(original: Any, method: Method) -> Any:
    """The method that records and then does what the original does."""

    @wraps(original)
    def recording(group: Any, *args: Any, **named: Any) -> Any:
        recorder = _active
        if recorder is not None:
            try:
                with recorder.lock:
                    recorder.enter(group, method, args, named, sys._getframe(1))
            except Exception as error:
                recorder.failed(error)
        return original(group, *args, **named)

    return recording


def _tensors(args: tuple[Any, ...], named: dict[str, Any], method: Method) -> Sequence[Any]:
    """The tensors of a call, lists of lists laid flat."""
    if method.at < 0:
        return ()
    given = args[method.at] if len(args) > method.at else named.get(method.name, ())
    if not isinstance(given, _LISTS):
        return [given]
    if given and isinstance(given[0], _LISTS):
        return [tensor for row in given for tensor in row]
    return given


def _extra(args: tuple[Any, ...], named: dict[str, Any], method: Method) -> tuple[str, int] | None:
    """The root of a rooted call, the peer of a point-to-point call, or that an all-to-all has splits of its own."""
    if method.rooted:
        root = getattr(args[-1] if args else named.get("opts"), "rootRank", None)
        return None if root is None else ("root", root)
    if 0 <= method.peer < len(args):
        return "peer", args[method.peer]
    if method.splits and any(args[2:4]):
        return "uneven", 1
    return None


def _tail(op: str, tensors: Sequence[Any], extra: tuple[str, int] | None, site: str) -> bytes:
    """What of a call's line does not count up."""
    entry: dict[str, Any] = {"op": op, "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]}
    entry["shapes"] = [list(tensor.shape) for tensor in tensors]
    if extra:
        entry[extra[0]] = extra[1]
    entry["site"] = site
    return json.dumps(entry)[1:].encode() + b"\n"
