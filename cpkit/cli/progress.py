"""One line on a terminal that says how far a replay has come."""

import os
import sys
from collections.abc import Callable
from time import monotonic

from cpkit.simulate.loop import Progress

EVERY_S = 0.2


class StatusLine:
    """Redrawn in place on stderr; nothing at all where stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._next = 0.0

    def show(self, text: Callable[[], str]) -> None:
        """Draw the line, at most a few times a second."""
        if self._shown and monotonic() >= self._next:
            self._next = monotonic() + EVERY_S
            room = max(_columns() - 1, 1)  # a line that wraps could not be redrawn in place
            print(f"\r{text()[:room]}\033[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away before a report."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class ProgressLine:
    """The line of a replay."""

    def __init__(self) -> None:
        self._line = StatusLine()

    def show(self, progress: Progress) -> None:
        """Draw how far the replay has come."""
        self._line.show(lambda: progress_text(progress))

    def clear(self) -> None:
        """Take the line away before a report."""
        self._line.clear()


def _columns() -> int:
    """Of the terminal behind stderr; some say 0, which is not known."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def progress_text(progress: Progress) -> str:
    """Steps, requests, rate and time to go.  step 1,200   310/4,000 requests   95 steps/s   2:05 to go"""
    rate = progress.num_steps / progress.elapsed_s if progress.elapsed_s else 0.0
    left_s = progress.elapsed_s * (1 / progress.fraction - 1) if progress.fraction else 0.0
    to_go = f"   {int(left_s) // 60}:{int(left_s) % 60:02} to go" if progress.fraction else ""
    return (
        f"step {progress.num_steps:,}   {progress.num_done:,}/{progress.num_requests:,} requests   "
        f"{rate:,.{int(rate < 10)}f} steps/s{to_go}"
    )
