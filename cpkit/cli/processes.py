"""How many processes a command uses."""

import os

from cpkit.errors import ConfigError

MAX_DEFAULT = 8
"""Processes at most where none are asked for."""


def num_processes(asked: int | None) -> int:
    """What --processes says, else one a core, at most MAX_DEFAULT. Raises ConfigError."""
    if asked is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MAX_DEFAULT)
    if not 1 <= asked <= 256:
        raise ConfigError(f"--processes {asked}: from 1 to 256")
    return asked
