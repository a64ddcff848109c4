"""Selection over simulated DCP ranks: hostile rows end in what a plain sort of the whole rows says, on every rank."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cpkit.comm.simulated import run_ranks  # noqa: E402
from cpkit.topology import Topology  # noqa: E402
from tests.worker.hostile_selection import SPANS, expected, hostile_rows, select  # noqa: E402


def check(world, k, *, names=(), **options):
    rows = {name: row for name, row in hostile_rows(k).items() if not names or name in names}
    found = run_ranks(Topology(**world), lambda comm: select(comm, list(rows.values()), k, **options).tolist())
    for rank, selections in enumerate(found):
        for (name, row), got in zip(rows.items(), selections, strict=True):
            assert got == expected(row, k), (name, rank)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("interleave", [1, 5, 64])
@pytest.mark.parametrize("world", [{"tp": 2, "dcp": 2}, {"tp": 2, "pcp": 2, "dcp": 4}], ids=["two", "another-order"])
def test_hostile_rows(world, interleave, spans):
    for k in (3, 512):
        check(world, k, interleave=interleave, spans=SPANS[spans], backend="torch")


@pytest.mark.slow
def test_the_kernels_select_the_same():
    names = ("ties-at-the-last-place", "nan-and-few", "no-keys")
    check({"tp": 2, "dcp": 2}, 512, names=names, interleave=64, spans=(100, 368), backend="triton")
