"""The ways cpkit refuses: each message names the values, the rule they break, and the way out."""


class ConfigError(ValueError):
    """Settings that cannot work together (topology, model, budget), whatever the traffic."""


class PlanError(ValueError):
    """A batch that this configuration cannot plan, or arrays that contradict each other."""


class InputError(ValueError):
    """Input that cannot be read as what it should be; names the file and place, or the flag, and the reason."""


class DesyncError(RuntimeError):
    """Ranks that disagree about a step; names the ranks, the field and both values."""
