"""A bound on collectives of a GPU, whose host waits wherever the program next reads a result, and would wait for ever.

    host       calls 4, 5, 6 ─► goes on ... reads a result, and hangs in there
    stream     ── call 4 ── call 5: a rank did not come ...
    watch      puts an event behind call 6 ... not done for timeout_s: tells all ranks, ends the process

Nothing else can be done from here: the thread that waits is inside the CUDA driver. torch's own watchdog would act, but
a minute or more later, since it writes its records first. The program pays for a note of each call, and no more; it
must not capture a CUDA graph with collectives in it.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cpkit.comm.call import Call, Group
from cpkit.errors import print_error

POLL_S = 0.1
GRACE_S = 1.0


@dataclass(slots=True)
class _Entry:
    """A call, when it was entered and on which stream; it is_inside until the host has come back from it."""

    call: Call
    group: Group
    since: float
    stream: torch.cuda.Stream | None
    is_inside: bool = True


class Watch:
    """Watches the collectives of one rank from a thread of its own.

    heard: what another rank's alarm says, if any. told: is given the text before this process ends, to pass it on.
    alarm: what was heard; the program then has GRACE_S to end by itself.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        timeout_s: float,
        heard: Callable[[], str | None],
        told: Callable[[str], None],
    ) -> None:
        self.alarm: str | None = None
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._heard = heard
        self._told = told
        self._lock = threading.Lock()
        self._new: list[_Entry] = []
        self._watched: list[_Entry] = []
        self._events: list[torch.cuda.Event] = []  # behind all that is watched
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="cpkit-watch", daemon=True).start()

    def enter(self, call: Call, group: Group) -> None:
        """A call begins."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        entry = _Entry(call, group, time.monotonic(), stream)
        with self._lock:
            self._new.append(entry)

    def leave(self) -> None:
        """It is on the stream."""
        self._new[-1].is_inside = False

    def failed(self) -> None:
        """It could not be put on the stream, and is not waited for."""
        with self._lock:
            self._new.pop()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            self.alarm = self.alarm or self._heard()
            if self.alarm is not None and not self._stopped.wait(GRACE_S):
                self._end(self.alarm)
            if not all(event.query() for event in self._events):  # type: ignore[no-untyped-call]
                self._check(self._watched)
                continue
            with self._lock:
                last = [entry for entry in self._new if entry.is_inside]
                self._watched = [entry for entry in self._new if not entry.is_inside]
                self._new = last
            self._events = [_event_on(stream) for stream in {entry.stream for entry in self._watched} if stream]
            self._check(last)

    def _check(self, entries: list[_Entry]) -> None:
        """End the process if the first of these calls has not got done for too long."""
        if not entries or time.monotonic() - entries[0].since <= self._timeout_s:
            return
        first, others = entries[0], len(entries) - 1
        more = f", or in one of the {others} that it entered next" if others else ""
        self._end(
            f"rank {self._rank} was left alone in call {first.call.number} over {first.group}: {first.call}{more}\n"
            f"  the GPU did not get through it within {self._timeout_s:g} s: a rank of the group died, is elsewhere, "
            "or did not come in time"
        )

    def _end(self, text: str) -> None:
        self._told(text)
        print_error(f"rank {self._rank}: DesyncError: {text}")
        os._exit(1)


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
