"""Tables of docs/indexer-kernels.md are those of the results: `python -m tests.kernels.indexer_page` writes them."""

import pytest

pytest.importorskip("triton")

from tests.kernels.indexer_page import PAGE, TABLES, ratio, took
from tests.sizing.pages import blocks

FOUND = blocks(PAGE)


def test_every_table_stands_on_the_page():
    assert FOUND.keys() == TABLES.keys()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_the_results(name):
    assert FOUND[name] == TABLES[name]()


def test_a_missed_target_is_told():
    assert ratio(0.9, 1.0, 0.85) == "0.900 (target 0.85, missed)"
    assert ratio(0.85, 1.0, 0.85) == "0.850 (target 0.85)"
    assert [took(ms) for ms in (8.1023, 0.4577, 0.0161)] == ["8.10 ms", "0.458 ms", "16.1 µs"]
