"""Prefix hashes of traces: small names for large ids, and how many tokens one hash stands for."""

from typing import Any

import numpy as np

from cpkit.arrays import Int32Array, ceil_div, seal
from cpkit.workload.request import NO_HASHES


class HashNames:
    """Ids of any size as names 0, 1, 2, ... in order of first sight. Names count on across scopes, ids do not.

    scope 1: ids 90 91 90 -> 0 1 0      scope 2: ids 90 92 -> 2 3
    """

    def __init__(self) -> None:
        self._names: dict[int, int] = {}
        self._next = 0

    def new_scope(self) -> None:
        """From here on an id has nothing to do with an equal id before."""
        self._names = {}

    def names(self, ids: Any) -> Int32Array:
        """[len(ids)] int32, read-only; ValueError unless ids is a list of whole numbers."""
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise ValueError(f"hash_ids={ids!r:.40} is not a list of whole numbers")
        known, base = self._names, self._next - len(self._names)
        named = [known.setdefault(i, base + len(known)) for i in ids]
        self._next = base + len(known)
        return seal(np.array(named, np.int32)) if named else NO_HASHES

    def fresh(self, count: int) -> Int32Array:
        """[count] int32 names that no id has and none will get."""
        first, self._next = self._next, self._next + count
        return np.arange(first, first + count, dtype=np.int32)


class HashBlockSize:
    """Tokens a hash stands for, from prompt lengths and numbers of hashes, where the trace does not say.

    n hashes of B tokens name a prompt of L tokens either to its end, n = ceil(L / B), or in whole blocks alone,
    n = floor(L / B). Each row narrows the range of B; a row that leaves neither reading any B is malformed.

        L=1000, n=2    to the end: 500 <= B <= 999    whole blocks: 334 <= B <= 500
    """

    def __init__(self) -> None:
        self._to_end: tuple[float, float] = (1, np.inf)
        self._whole: tuple[float, float] = (1, np.inf)

    def observe(self, prompt_len: int, num_hashes: int) -> None:
        """Take a row in, or raise ValueError and leave it out. A row without hashes says nothing."""
        if num_hashes == 0:
            return
        if num_hashes > prompt_len:
            raise ValueError(f"{num_hashes} hashes for {prompt_len} tokens: no block size fits this row")
        longest = (prompt_len - 1) // (num_hashes - 1) if num_hashes > 1 else np.inf
        to_end = _overlap(self._to_end, (ceil_div(prompt_len, num_hashes), longest))
        whole = _overlap(self._whole, (prompt_len // (num_hashes + 1) + 1, prompt_len // num_hashes))
        if to_end[0] > to_end[1] and whole[0] > whole[1]:
            raise ValueError(
                f"{num_hashes} hashes for {prompt_len} tokens: no block size fits this row and those before it"
            )
        self._to_end, self._whole = to_end, whole

    def choose(self, usual: int) -> int:
        """The format's usual size if either reading allows it, else the smallest power of two, else the smallest.

        Small is safe: fewer tokens are taken for shared than may have been.
        """
        ranges = [r for r in (self._to_end, self._whole) if r[0] <= r[1]]
        if any(low <= usual <= high for low, high in ranges):
            return usual
        powers = [power for low, high in ranges if (power := 1 << (int(low) - 1).bit_length()) <= high]
        return min(powers) if powers else min(int(low) for low, _ in ranges)


def _overlap(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return max(a[0], b[0]), min(a[1], b[1])
