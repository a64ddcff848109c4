"""Triton's interpreter, one thread at a time.

TRITON_INTERPRET=1 runs kernels on a CPU. For the length of a launch the interpreter swaps the functions of
triton.language for its own, for all threads, and simulated ranks are threads: without turns one would find the
functions of another's launch gone.

`take_turns` makes launches wait for each other; importing cpkit.kernels.backends calls it. Compiled kernels are not
touched.
"""

import functools
import threading
from typing import Any

from triton.runtime.interpreter import InterpretedFunction

_LAUNCH = threading.RLock()


def take_turns() -> None:
    """Let one interpreted kernel run at a time, however often this is called."""
    run = InterpretedFunction.run
    if hasattr(run, "__wrapped__"):
        return

    @functools.wraps(run)
    def run_alone(*args: Any, **kwargs: Any) -> Any:
        with _LAUNCH:
            return run(*args, **kwargs)

    InterpretedFunction.run = run_alone
