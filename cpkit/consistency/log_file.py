"""A log that survives the death of its process: bytes go into a shared memory map, so the kernel holds each at once.

A write is a memory copy, no system call. Space is reserved a window at a time before it is mapped, so a full disk is
an OSError here and not a signal later. While open, the file ends in zeros up to the end of its window; close cuts them
off.
"""

import mmap
import os
from pathlib import Path

WINDOW_BYTES = 1 << 20


class LogFile:
    """An append-only file of lines; raises FileExistsError for a name in use, OSError where there is no room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._base = 0
        self._at = 0
        self._window = self._map()

    def write(self, line: bytes) -> None:
        """Append one line, its newline included."""
        end = self._at + len(line)
        if end > WINDOW_BYTES:
            self._write_over_the_edge(line)
            return
        self._window[self._at : end] = line
        self._at = end

    def close(self) -> None:
        """Cut the zeros off and let go."""
        self._window.close()
        os.ftruncate(self._fd, self._base + self._at)
        os.close(self._fd)

    def abandon(self) -> None:
        """Let go of a file that another process, which this one was forked from, goes on writing."""
        self._window.close()
        os.close(self._fd)

    def _write_over_the_edge(self, line: bytes) -> None:
        while line:
            part = line[: WINDOW_BYTES - self._at]
            self._window[self._at : self._at + len(part)] = part
            self._at += len(part)
            line = line[len(part) :]
            if self._at == WINDOW_BYTES:
                self._base += WINDOW_BYTES
                self._at = 0
                self._window.close()
                self._window = self._map()

    def _map(self) -> mmap.mmap:
        os.posix_fallocate(self._fd, self._base, WINDOW_BYTES)
        return mmap.mmap(self._fd, WINDOW_BYTES, offset=self._base)
