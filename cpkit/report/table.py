"""Aligned text tables, and numbers as people read them."""

from collections.abc import Sequence

BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Lines of a table; align has one letter a column, l or r.

    rank  tokens
       0   1,024
      12     512
    """
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return ["  ".join(_pad(*cell) for cell in zip(row, widths, align, strict=True)).rstrip() for row in cells]


def _pad(text: str, width: int, side: str) -> str:
    return text.rjust(width) if side == "r" else text.ljust(width)


def indent(lines: Sequence[str], by: int = 2) -> list[str]:
    """The lines moved to the right; empty ones stay empty."""
    return [" " * by + line if line else line for line in lines]


def shorten(rows: Sequence[Sequence[str]], limit: int) -> list[Sequence[str]]:
    """At most `limit` rows: the first ones, a row that counts those left out, and the last two.

    limit=4, rows 0 .. 9:    0, ... 7 more, 8, 9
    """
    if len(rows) <= limit:
        return list(rows)
    head = limit - 3
    gap = ["...", f"{len(rows) - head - 2:,} more", *[""] * (len(rows[0]) - 2)]
    return [*rows[:head], gap, *rows[-2:]]


def count(number: int) -> str:
    """Whole numbers with thousands separators.  1234567 -> 1,234,567"""
    return f"{number:,}"


def size(num_bytes: float) -> str:
    """Bytes with a binary unit.  1023 -> 1023 B, 1610612736 -> 1.5 GiB"""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    scaled = num_bytes / 1024
    for unit in BINARY_UNITS[:-1]:
        if scaled < 999.95:
            return f"{scaled:.1f} {unit}"
        scaled /= 1024
    return f"{scaled:,.1f} {BINARY_UNITS[-1]}"


def micros(us: float) -> str:
    """A duration given in microseconds.  454 -> 454 us, 24100 -> 24.1 ms, 1356911 -> 1.4 s"""
    if us < 9999.5:
        return f"{us:,.0f} us"
    return f"{us / 1e3:,.1f} ms" if us < 999_950 else f"{us / 1e6:,.1f} s"


def share(part: float, whole: float) -> str:
    """A part in per cent; what is there but rounds to nothing shows as <0.1%."""
    percent = 100 * part / whole if whole else 0.0
    return "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"


def plural(number: int, noun: str) -> str:
    """1 step, 2,000 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def every(number: int, noun: str) -> str:
    """all 2,000 steps; of one: the one step."""
    return f"{'the one' if number == 1 else f'all {number:,}'} {noun}{'' if number == 1 else 's'}"
