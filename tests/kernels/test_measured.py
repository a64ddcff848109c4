"""Tables of docs/kernels.md and docs/indexer-kernels.md are those of the code and the results.

`python -m tests.kernels.measured` and `python -m tests.kernels.indexer_page` write them.
"""

import re

import pytest

pytest.importorskip("triton")

from cpkit.kernels.registry import all_kernels
from tests.kernels import indexer_page, measured
from tests.kernels.indexer_page import ratio, took
from tests.kernels.measured import KERNELS, PAGE
from tests.sizing.pages import DOCS, blocks

PAGES = {page.PAGE: page.TABLES for page in (measured, indexer_page)}
FOUND = {page: blocks(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_every_table_stands_on_the_page(page):
    assert FOUND[page].keys() == PAGES[page].keys()


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, tables in PAGES.items() for name in tables])
def test_a_table_is_that_of_the_results(page, name):
    assert FOUND[page][name] == PAGES[page][name]()


def test_a_missed_target_is_told():
    assert ratio(0.9, 1.0, 0.85) == "0.900 (target 0.85, missed)"
    assert ratio(0.85, 1.0, 0.85) == "0.850 (target 0.85)"
    assert [took(ms) for ms in (8.1023, 0.4577, 0.0161)] == ["8.10 ms", "0.458 ms", "16.1 µs"]


def test_every_kernel_of_metadata_caches_and_gathers_is_listed():
    modules = {entry.kernel.fn.__module__.rpartition(".")[2] for entry in all_kernels()}
    listed = {file for file, _ in KERNELS.values()} | {"meet"}  # a meeting stands with the gather paths
    indexer = {name for name in modules if re.match("mqa_|paged_mqa_|topk|indexer_topk|exchange_|head_sums", name)}
    assert modules - indexer == listed - {"table_slots", "pool_keys"}  # torch alone


def test_overlap_and_bounds_are_told_as_measured():
    """The sentences that quote a number quote the table's."""
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    assert "1,041.3 µs overlapped, 1,075.6 one by one" in text
    assert all(number in FOUND[PAGE]["overlap"] for number in ("1,041.3", "1,075.6"))
