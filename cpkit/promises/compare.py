"""Comparing planned values: the first wrong place, equal values of different objects, and where two differ."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from cpkit.arrays import BoolArray

T = TypeVar("T")


def first(wrong: BoolArray) -> int | None:
    """Index of the first True, or None.  [0 0 1 1] -> 2"""
    if not wrong.size:
        return None
    at = int(wrong.argmax())
    return at if wrong[at] else None


def same(a: Any, b: Any) -> bool:
    """Two planned values hold the same numbers, whatever objects they are. Called very often, so bytes are compared."""
    if a is b:
        return True
    kind = a.__class__
    if kind is not b.__class__:
        return False
    if kind is np.ndarray:
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if kind is dict:
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if kind is tuple or kind is list:
        return len(a) == len(b) and all(map(same, a, b))
    values = _array_fields(kind)
    return bool(a == b) if values is None else all(map(same, values(a), values(b)))


def other_ranks(num_odd: int, num_others: int) -> str:
    """What the ranks with the other value are called: a value that half of them have is no majority's."""
    return "most ranks" if num_others > num_odd else "as many others"


def difference(name: str, a: Any, b: Any, others: str = "most ranks") -> str:
    """The first place where two values differ, and both values there.

    difference("partition", ...) -> "partition.mode[3] is 1, on most ranks 0", a being the odd one.
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape and (a != b).any():
        at = tuple(int(i) for i in np.argwhere(a != b)[0])
        return f"{name}[{', '.join(map(str, at))}] is {a[at]}, on {others} {b[at]}"
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return f"{name} is {a.dtype} of shape {a.shape}, on {others} {b.dtype} of shape {b.shape}"
    if type(a) is type(b):
        for part, left, right in _parts(a, b):
            if not same(left, right):
                return difference(f"{name}{part}", left, right, others)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        longer, common = (a if len(a) > len(b) else b), min(len(a), len(b))
        return f"{name} has {len(a)} entries, on {others} {len(b)}; only one has [{common}], {longer[common]}"
    return f"{name} is {a!r}, on {others} {b!r}"


def distinct(values: Sequence[Any]) -> list[int]:
    """For each value the index of the first that equals it.  a b a c b -> 0 1 0 3 1"""
    leads: list[int] = []
    out = []
    for i, value in enumerate(values):
        for lead in leads:
            if same(values[lead], value):
                out.append(lead)
                break
        else:
            leads.append(i)
            out.append(i)
    return out


def by_key(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


@cache
def _array_fields(kind: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    """Reads the fields of a dataclass that has no == of its own, because it holds arrays; None for any other type."""
    params = getattr(kind, "__dataclass_params__", None)
    return None if params is None or params.eq else attrgetter(*kind.__dataclass_fields__)


def _parts(a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
    """What two values of one type are made of, pairwise, with the way to write it."""
    if isinstance(a, dict):
        return [(f"[{key!r}]", a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys())]
    if isinstance(a, list | tuple):
        return [(f"[{i}]", left, right) for i, (left, right) in enumerate(zip(a, b, strict=False))]
    names = getattr(a, "__dataclass_fields__", ())
    return [(f".{name}", getattr(a, name), getattr(b, name)) for name in names]
