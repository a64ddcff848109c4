"""Rows of a benchmark's file that were measured again take the places of the old ones; the others keep their day."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.metadata import replaced_rows


def test_rows_measured_again():
    old = [{"work": "a", "shape": "1", "us": 1}, {"work": "a", "shape": "2", "us": 2, "date": "2026-01-01"}]
    before = {"date": "2026-02-02", "rows": old}
    new = [{"work": "b", "shape": "1", "us": 7}, {"work": "a", "shape": "1", "us": 8}]
    assert replaced_rows(before, new) == [
        {"work": "a", "shape": "1", "us": 8},
        {"work": "a", "shape": "2", "us": 2, "date": "2026-01-01"},
        {"work": "b", "shape": "1", "us": 7},
    ]
    assert replaced_rows(before, []) == [{**old[0], "date": "2026-02-02"}, old[1]]
