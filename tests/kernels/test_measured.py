"""Tables of docs/kernels.md are those of the code and the results: `python -m tests.kernels.measured` writes them."""

import re

import pytest

pytest.importorskip("triton")

from cpkit.kernels.registry import all_kernels
from tests.kernels.measured import KERNELS, PAGE, TABLES
from tests.sizing.pages import DOCS, blocks

FOUND = blocks(PAGE)


def test_every_table_stands_on_the_page():
    assert FOUND.keys() == TABLES.keys()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_the_results(name):
    assert FOUND[name] == TABLES[name]()


def test_every_kernel_of_metadata_caches_and_gathers_is_listed():
    modules = {entry.kernel.fn.__module__.rpartition(".")[2] for entry in all_kernels()}
    listed = {file for file, _ in KERNELS.values()} | {"meet"}  # a meeting stands with the gather paths
    indexer = {name for name in modules if re.match("mqa_|paged_mqa_|topk|indexer_topk|exchange_|head_sums", name)}
    assert modules - indexer == listed - {"table_slots", "pool_keys"}  # torch alone


def test_overlap_and_bounds_are_told_as_measured():
    """The sentences that quote a number quote the table's."""
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    assert "1,041.3 µs overlapped, 1,075.6 one by one" in text
    assert all(number in FOUND["overlap"] for number in ("1,041.3", "1,075.6"))
