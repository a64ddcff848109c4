"""The ways cpkit refuses: each message names the values, the rule they break, and the way out."""

import sys


class ConfigError(ValueError):
    """Settings that cannot work together (topology, model, budget), whatever the traffic."""


class PlanError(ValueError):
    """A batch that this configuration cannot plan, or arrays that contradict each other."""


class InputError(ValueError):
    """Input that cannot be read as what it should be; names the file and place, or the flag, and the reason."""


class DesyncError(RuntimeError):
    """Ranks that disagree about a step; names the ranks, the field and both values."""


def print_error(text: str) -> None:
    """Write lines to stderr in one piece: the ranks of a job and its launcher write there at the same time."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
