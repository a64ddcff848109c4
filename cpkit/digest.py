"""A fingerprint of a planned value: the same on every machine, Python and numpy, whoever planned it."""

import hashlib
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

_PLAIN = (bool, int, type(None), np.integer)  # a union would be made anew at every value
_LISTS = (list, tuple)


def digest(value: Any) -> str:
    """16 hex digits over whole numbers, strings, arrays, and dataclasses or sequences of them.

    Arrays count by shape and values (integers as little-endian int64), so that dtype widths of a platform play no part.
    """
    state = hashlib.blake2b(digest_size=8)
    _feed(state.update, value)
    return state.hexdigest()


@lru_cache(maxsize=64)
def repeated_digest(value: Any) -> str:
    """The digest of a hashable value that comes back step after step, such as a model: read once, then remembered."""
    return digest(value)


def _feed(update: Any, value: Any) -> None:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
        update(f"a{value.shape}".encode())
        update(np.ascontiguousarray(value, "<i8").tobytes())
    elif isinstance(value, str):
        update(f"s{len(value)}:{value};".encode())  # the length keeps a ";" inside from ending it
    elif isinstance(value, _PLAIN):
        update(f"{'i' if isinstance(value, np.integer) else type(value).__name__[0]}{value};".encode())
    elif isinstance(value, _LISTS):
        update(f"({len(value)}".encode())
        for item in value:
            _feed(update, item)
    elif isinstance(value, dict):
        _feed(update, sorted(value.items()))
    elif is_dataclass(value):
        update(f"<{type(value).__name__}".encode())
        kind: Any = type(value)
        for name in _field_names(kind):
            _feed(update, getattr(value, name))
    else:
        told = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"no digest for {told}: plans hold whole numbers, strings, arrays of them and dataclasses")


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
