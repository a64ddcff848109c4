"""Which implementations of a kernel exist: the caller names one and gets that one, or a refusal."""

from cpkit.errors import ConfigError


def check_backend(kernel: str, backend: str, built: tuple[str, ...] = ("torch",)) -> None:
    """Raise ConfigError unless this kernel has the implementation that was asked for."""
    if backend not in built:
        raise ConfigError(f"{kernel} with backend={backend!r}: it is built for {', '.join(built)}; name one of them")
