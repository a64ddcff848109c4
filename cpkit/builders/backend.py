"""Which implementation of the kernels a builder runs: the one that its caller names, else the one of its device.

cuda    triton
other   torch        (Triton's interpreter runs on a CPU too, where a test names it)
"""

import torch

from cpkit.errors import ConfigError
from cpkit.kernels.backends import BACKENDS


def choose_backend(named: str | None, device: torch.device) -> str:
    """The named backend, or the device's; raises ConfigError for a name that is none."""
    if named is None:
        return "triton" if device.type == "cuda" else "torch"
    if named not in BACKENDS:
        raise ConfigError(f"backend={named!r}: name one of {', '.join(BACKENDS)}, or none for the device's own")
    return named
