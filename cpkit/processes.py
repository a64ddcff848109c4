"""Processes that work for this one: they end with it, and Ctrl-C is this one's to decide."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def leave_with_parent() -> None:
    """Called in a process that works for another: end when that one is gone, however it was ended."""

    def watch() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes started here never see Ctrl-C, which reaches all of a terminal's: the one that starts them decides.

    They inherit the blocked signal; here it waits, and is delivered afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """A second Ctrl-C does not break into the end of the processes, which would then hang on what it left undone.

    Only a main thread can be broken into, and only where Ctrl-C means what it usually does.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
