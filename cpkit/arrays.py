"""Small rules for integer arrays: exact conversion, freezing, prefix sums."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

A = TypeVar("A", bound=npt.NDArray[Any])

MAX_LEN = 1 << 40
"""Largest sequence length accepted."""

MAX_LENS = 1 << 20
"""Most lengths in a list: their sum, and its product with a few ranks, stay inside int64."""


def as_lens(name: str, values: Sequence[int] | npt.ArrayLike, error: type[ValueError]) -> IntArray:
    """Lengths as a read-only 1-D int64 array; floats, booleans, negatives and values above MAX_LEN raise `error`."""
    array = as_ints(name, values, error)
    if array.size > MAX_LENS:
        raise error(f"{name} has {array.size} entries: at most {MAX_LENS} keep their sum inside 64 bits")
    if array.size and (array.min() < 0 or array.max() > MAX_LEN):
        bad = int(np.flatnonzero((array < 0) | (array > MAX_LEN))[0])
        raise error(f"{name}[{bad}]={int(array[bad])}: a length is between 0 and 2^40")
    return freeze(array)


def as_ints(name: str, values: Sequence[int] | npt.ArrayLike, error: type[ValueError]) -> IntArray:
    """Whole numbers as a 1-D int64 array, or `error`: nothing is rounded and nothing wraps."""
    try:
        array = np.asarray(values)
    except ValueError as ragged:
        raise error(f"{name} is ragged: it is a flat list of whole numbers") from ragged
    if array.ndim != 1:
        raise error(f"{name} has {array.ndim} dimensions: it is a flat list of whole numbers")
    if array.size == 0:
        return np.zeros(0, np.int64)
    # numpy reads True among whole numbers as 1, so the caller's own items are looked at
    has_bools = isinstance(values, list | tuple) and not {bool, np.bool_}.isdisjoint(map(type, values))
    if has_bools or array.dtype.kind not in "iu" or int(array.max()) > np.iinfo(np.int64).max:
        items = list(values) if isinstance(values, list | tuple) else array.tolist()
        bad = next((repr(item) for item in items if not _fits_int64(item)), f"{array.dtype} items")
        raise error(f"{name} holds {bad}: it takes whole numbers that fit 64 bits")
    return np.ascontiguousarray(array, np.int64)


def _fits_int64(item: Any) -> bool:
    whole = isinstance(item, int | np.integer) and not isinstance(item, bool)
    return whole and -(1 << 63) <= item < 1 << 63


def freeze(array: A) -> A:
    """The same values, no longer writable; a writable input is copied so that its owner cannot change the plan."""
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def seal(array: A) -> A:
    """The array itself, no longer writable: for values that nobody else holds."""
    array.flags.writeable = False
    return array


def prefix_sum(lens: IntArray) -> IntArray:
    """[n] -> [n + 1] int64: where each run starts, then the total.  2 0 3 -> 0 2 2 5"""
    out = np.zeros(len(lens) + 1, np.int64)
    np.add.accumulate(lens, out=out[1:])
    return out


def spread(lens: IntArray, starts: IntArray | None = None) -> IntArray:
    """[sum(lens)] int64: 0..len-1 for each run in turn, each moved by its start.  lens 2 0 3 -> 0 1 0 1 2"""
    ends = np.cumsum(lens)
    offset = ends - lens if starts is None else ends - lens - starts
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) - np.repeat(offset, lens)


def ceil_div(a: Any, b: Any) -> Any:
    """a / b rounded up, for whole numbers or arrays of them."""
    return -(-a // b)
