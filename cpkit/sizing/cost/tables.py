"""Measured times of kernels and collectives, and how to read between their points.

A kernel's table has one curve for each number of query rows: time over the mean number of keys that a row sees.

    keys     1,024   8,192  65,536       a shape between four points is read along both curves, then between them;
    256 rows    o-------o-------o        one outside is moved to the nearest edge, and the caller, who is told where
    512 rows    o---x---o-------o        the edge was, scales what was measured there to the shape that was asked for
"""

import csv
import gzip
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "gb200": "gb200"}
"""The tables' names of chips."""


ORIGINS = {"vendor": "aiconfigurator-core 0.12.0", "own": "this project"}
"""Who measured a row."""


@dataclass(frozen=True, slots=True)
class Reading:
    """seconds at (rows, keys), the shape asked for or the nearest one of the table; inside: it is the one asked for."""

    seconds: float
    rows: float
    keys: float
    inside: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """Times over a growing quantity, straight between points."""

    at: tuple[float, ...]
    seconds: tuple[float, ...]

    def read(self, at: float) -> tuple[float, float]:
        """Seconds at a place, and the place: the end of the curve for one beyond it."""
        points, seconds = self.at, self.seconds
        if at <= points[0]:
            return seconds[0], points[0]
        if at >= points[-1]:
            return seconds[-1], points[-1]
        right = bisect_left(points, at)
        left = right - 1
        share = (at - points[left]) / (points[right] - points[left])
        return seconds[left] + share * (seconds[right] - seconds[left]), at


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Times of one kernel on one chip: rows, ascending, and the curve of each."""

    rows: tuple[float, ...]
    curves: tuple[Curve, ...]

    def read(self, rows: float, keys: float) -> Reading:
        """Time of `rows` query rows that see `keys` keys each on average."""
        axis = self.rows
        right = min(bisect_left(axis, rows), len(axis) - 1)
        left = right if axis[right] <= rows or right == 0 else right - 1
        near = min(max(rows, axis[left]), axis[right])
        low, low_keys = self.curves[left].read(keys)
        if left == right:
            return Reading(low, near, low_keys, near == rows and low_keys == keys)
        high, high_keys = self.curves[right].read(keys)
        if low_keys != high_keys:  # one of the curves ends before: both are read where both have points
            keys_there = low_keys if abs(low_keys - keys) > abs(high_keys - keys) else high_keys
            low, low_keys = self.curves[left].read(keys_there)
            high, high_keys = self.curves[right].read(keys_there)
        share = (near - axis[left]) / (axis[right] - axis[left])
        return Reading(low + share * (high - low), near, high_keys, near == rows and low_keys == high_keys == keys)


@cache
def kernel_tables(chip: str) -> dict[str, KernelTable]:
    """Tables of a chip by kernel; empty where nothing was measured."""
    points: defaultdict[str, defaultdict[float, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in _rows("kernels.csv.gz"):
        if row["system"] == SYSTEMS.get(chip):
            points[row["kernel"]][float(row["rows"])].append((float(row["keys"]), 1e-3 * float(row["ms"])))
    return {kernel: _table(by_rows) for kernel, by_rows in points.items()}


@cache
def cpkit_tables(chip: str) -> dict[str, tuple[KernelTable, int]]:
    """Tables of cpkit's own kernels on a chip, each with the heads it was measured with; empty where none was run."""
    return tables_with_heads(row for row in _rows("cpkit.csv.gz") if row["system"] == SYSTEMS.get(chip))


def tables_with_heads(points: Iterable[Mapping[str, str | float]]) -> dict[str, tuple[KernelTable, int]]:
    """Tables and their heads by kernel, from points of kernel, heads, rows, keys and ms."""
    found: defaultdict[tuple[str, int], defaultdict[float, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for point in points:
        curve = found[str(point["kernel"]), int(point["heads"])][float(point["rows"])]
        curve.append((float(point["keys"]), 1e-3 * float(point["ms"])))
    return {kernel: (_table(by_rows), heads) for (kernel, heads), by_rows in found.items()}


@cache
def table_origins(chip: str) -> dict[str, str]:
    """Who measured a chip's tables, by kernel; who has most points first."""
    points: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in _rows("kernels.csv.gz"):
        if row["system"] == SYSTEMS.get(chip):
            points[row["kernel"]][ORIGINS[row["origin"]]] += 1
    return {kernel: ", ".join(name for name, _ in found.most_common()) for kernel, found in points.items()}


def _table(by_rows: dict[float, list[tuple[float, float]]]) -> KernelTable:
    rows = tuple(sorted(by_rows))
    return KernelTable(rows, tuple(_curve(by_rows[number]) for number in rows))


def _curve(points: list[tuple[float, float]]) -> Curve:
    at, seconds = zip(*sorted(points), strict=True)
    return Curve(at, seconds)


@cache
def collective_curves(chip: str) -> dict[tuple[str, int], Curve]:
    """Seconds over bytes by (operation, ranks) on one host.

    Bytes are those of the whole buffer: what an all-gather returns, and what one rank puts into another operation.
    """
    points: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for row in _rows("nccl.csv.gz"):
        if row["system"] == SYSTEMS.get(chip):
            points[row["op"], int(row["ranks"])].append((float(row["bytes"]), 1e-3 * float(row["ms"])))
    return {kind: _curve(found) for kind, found in points.items()}


@cache
def decode_blocks(engine: str, model: str, heads: int) -> dict[tuple[int, int], float]:
    """Seconds of the attention block of one decode step on an H200 by (batch, context), as an engine ran it.

    heads: on the rank; fp8 cache and weights. What the model's own sum is compared with, never what it is made of.
    """
    return {
        (int(row["batch"]), int(row["context"])): 1e-3 * float(row["ms"])
        for row in _rows("decode_block.csv.gz")
        if (row["engine"], row["model"], int(row["heads"])) == (engine, model, heads)
    }


def _rows(name: str) -> Iterator[dict[str, str]]:
    data = (resources.files("cpkit") / "data" / "measured" / name).read_bytes()
    return csv.DictReader(gzip.decompress(data).decode().splitlines())
