"""A bound on collectives of a GPU, whose host waits wherever the program next reads a result, and would wait for ever.

    host       enter call 5 ─ record event ─► goes on ... reads a result, and hangs in there
    stream     ── call 4 ── event 4 ── call 5: a rank did not come ...
    watch      event 4 is done       event 5 is not, since timeout_s: tell all ranks, end the process

Nothing else can be done from here: the thread that waits is inside the CUDA driver. torch's own watchdog would act, but
only after a minute or more of writing its records.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cpkit.comm.call import Call, Group

POLL_S = 0.1
GRACE_S = 1.0


@dataclass(slots=True)
class _Entry:
    """A call that may not be done. event: behind it on the stream; None while the host is still inside the call."""

    call: Call
    group: Group
    since: float
    event: torch.cuda.Event | None = None


class Watch:
    """Watches the collectives of one rank from a thread of its own.

    heard: what another rank's alarm says, if any. told: is given the text before this process ends, to pass it on.
    alarm: what was heard; the program then has GRACE_S to end by itself.
    """

    def __init__(
        self, rank: int, is_cuda: bool, timeout_s: float, heard: Callable[[], str | None], told: Callable[[str], None]
    ) -> None:
        self._rank = rank
        self._is_cuda = is_cuda
        self._timeout_s = timeout_s
        self._heard = heard
        self._told = told
        self._open: deque[_Entry] = deque()
        self._spare: deque[torch.cuda.Event] = deque()
        self.alarm: str | None = None
        self._progress = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="cpkit-watch", daemon=True).start()

    def enter(self, call: Call, group: Group) -> None:
        """A call begins."""
        with self._lock:
            self._open.append(_Entry(call, group, time.monotonic()))

    def leave(self) -> None:
        """It has been put on the current stream."""
        if not self._is_cuda:
            self.failed()  # it was done when it returned
            return
        event = self._spare.popleft() if self._spare else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._open[-1].event = event

    def failed(self) -> None:
        """It could not be put on the stream, and is not waited for."""
        with self._lock:
            self._open.pop()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            self.alarm = self._heard()
            if self.alarm is not None and not self._stopped.wait(GRACE_S):
                self._end(self.alarm)
            late = self._late()
            if late is not None:
                self._end(
                    f"rank {self._rank} was left alone in {late}\n  the GPU did not get through it within "
                    f"{self._timeout_s:g} s: a rank of the group died, is elsewhere, or did not come in time"
                )

    def _late(self) -> str | None:
        """The oldest call that is not done, if nothing got done for too long."""
        with self._lock:
            while self._open:
                oldest = self._open[0]
                if oldest.event is None or not oldest.event.query():  # type: ignore[no-untyped-call]
                    waited = time.monotonic() - max(oldest.since, self._progress)
                    text = f"call {oldest.call.number} over {oldest.group}: {oldest.call}"
                    return text if waited > self._timeout_s else None
                self._open.popleft()
                self._spare.append(oldest.event)
                self._progress = time.monotonic()
        return None

    def _end(self, text: str) -> None:
        self._told(text)
        print(f"rank {self._rank}: DesyncError: {text}", file=sys.stderr, flush=True)
        os._exit(1)
