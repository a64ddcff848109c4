"""Which implementations of a kernel exist: the caller names one and gets that one, or a refusal."""

from typing import Any

import torch
from triton import JITFunction

from cpkit.errors import ConfigError
from cpkit.kernels.interpreter import take_turns

take_turns()

BACKENDS = ("torch", "triton")


def check_backend(
    kernel: str,
    backend: str,
    built: tuple[str, ...] = ("torch",),
    *,
    compiled: Any = None,
    device: torch.device | None = None,
) -> None:
    """Raise ConfigError unless this kernel has the implementation that was asked for, and it runs on the device.

    compiled: the Triton function, which on a CPU runs only where Triton's interpreter was on when it was defined.
    """
    if backend not in built:
        raise ConfigError(f"{kernel} with backend={backend!r}: it is built for {', '.join(built)}; name one of them")
    if backend == "triton" and device is not None and device.type == "cpu" and isinstance(compiled, JITFunction):
        raise ConfigError(
            f"{kernel} with backend='triton' on cpu: give it tensors on a GPU, name backend='torch', or start Python "
            "with TRITON_INTERPRET=1 to try kernels at small sizes"
        )
