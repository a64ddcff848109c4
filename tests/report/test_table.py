"""Tables line up, and numbers read well at every edge of their units."""

import pytest

from cpkit.report.table import count, every, indent, micros, plural, share, shorten, size, table


def test_table():
    lines = table(["rank", "what"], [["0", "a"], ["12", "long text"]], "rl")
    assert lines == ["rank  what", "   0  a", "  12  long text"]


def test_indent_leaves_empty_lines_empty():
    assert indent(["a", "", "b"]) == ["  a", "", "  b"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1.0 MiB"),
        (999 * 1024, "999.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 50, "1.0 PiB"),
        (5000 << 50, "5,000.0 PiB"),
    ],
)
def test_size(num_bytes, text):
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 5, "0.0%"), (1, 1000, "0.1%"), (1, 3000, "<0.1%"), (5, 5, "100.0%"), (3, 2, "150.0%"), (0, 0, "0.0%")],
)
def test_share(part, whole, text):
    assert share(part, whole) == text


@pytest.mark.parametrize(
    ("us", "text"), [(0, "0 us"), (9999.4, "9,999 us"), (9999.5, "10.0 ms"), (999_949, "999.9 ms"), (999_950, "1.0 s")]
)
def test_micros(us, text):
    assert micros(us) == text


def test_count_and_plural():
    assert count(1234567) == "1,234,567"
    assert [plural(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert [every(n, "rank") for n in (1, 2, 2000)] == ["the one rank", "all 2 ranks", "all 2,000 ranks"]


@pytest.mark.parametrize(("num_rows", "shown"), [(4, 4), (5, 5), (6, 5), (100, 5)])
def test_shorten_keeps_both_ends(num_rows, shown):
    rows = [[str(i), "x"] for i in range(num_rows)]
    short = shorten(rows, 5)
    assert len(short) == shown and short[0] == rows[0] and short[-2:] == rows[-2:]
    if num_rows > 5:
        assert short[2] == ["...", f"{num_rows - 4} more"]
