"""Tile schedules against tiles dealt out one after another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS
from cpkit.kernels.tile_schedule import ROWS, WORKERS, tile_schedule

backends = pytest.mark.parametrize("backend", BACKENDS)


def schedule(lens, tile, num_workers, req=None, backend="torch"):
    wide = torch.full((num_workers + 2, 3), -99, dtype=torch.int32)
    out = wide[:-1, :2]
    req = None if req is None else torch.tensor(req, dtype=torch.int32)
    tile_schedule(torch.tensor(lens, dtype=torch.int32), tile=tile, req=req, out=out, backend=backend)
    assert (wide[:, 2] == -99).all() and (wide[-1] == -99).all()
    return [tuple(entry) for entry in out.tolist()]


def deal_out(tiles, num_rows, num_workers):
    """Starts of workers that take the tiles in order, the first ones one more where they do not divide."""
    starts, at = [], 0
    for worker in range(num_workers):
        starts.append(at)
        at += len(tiles) // num_workers + (worker < len(tiles) % num_workers)
    return [tiles[start] if start < len(tiles) else (num_rows, 0) for start in [*starts, len(tiles)]]


@backends
@settings(max_examples=30)
@given(lens=st.lists(st.integers(-1, 30), max_size=6), tile=st.integers(1, 8), num_workers=st.integers(1, 9))
def test_rows(backend, lens, tile, num_workers):
    tiles = [(row, at) for row, n in enumerate(lens) for at in range(-(-max(n, 0) // tile))]
    assert schedule(lens, tile, num_workers, backend=backend) == deal_out(tiles, len(lens), num_workers)


@backends
@settings(max_examples=30)
@given(groups=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), max_size=4), num_workers=st.integers(1, 5))
def test_rows_of_a_request_are_read_together(backend, groups, num_workers):
    lens = [n for group in groups for n in group]
    req = [at * 3 for at, group in enumerate(groups) for _ in group]
    tiles, row = [], 0
    for group in groups:
        tiles += [(row, at) for at in range(-(-max(group) // 4))]
        row += len(group)
    assert schedule(lens, 4, num_workers, req, backend) == deal_out(tiles, len(lens), num_workers)


@backends
@pytest.mark.parametrize("num_workers", [WORKERS - 2, WORKERS - 1, WORKERS])
@pytest.mark.parametrize("num_rows", [ROWS - 1, ROWS, ROWS + 1])
def test_blocks_of_rows_and_workers(num_rows, num_workers, backend):
    """The rows at the border of a block are one request, which counts once."""
    lens = [(7 * row) % 5 for row in range(num_rows)]
    req = [min(row, ROWS - 2) for row in range(num_rows)]
    tiles = [(row, at) for row in range(num_rows) for at in range(lens[row])]
    assert schedule(lens, 1, num_workers, backend=backend) == deal_out(tiles, num_rows, num_workers)
    longest = max(lens[ROWS - 2 :])
    tiles = [tile for tile in tiles if tile[0] < ROWS - 2] + [(ROWS - 2, at) for at in range(longest)]
    assert schedule(lens, 1, num_workers, req, backend) == deal_out(tiles, num_rows, num_workers)


@backends
def test_totals_beyond_int32(backend):
    """Three rows of 2^31 - 1 tiles: the middle worker starts in the middle of the middle row."""
    most = 2**31 - 1
    assert schedule([most] * 3, 1, 2, backend=backend) == [(0, 0), (1, 2**30), (3, 0)]


@backends
def test_the_drawn_example(backend):
    assert schedule([5, 0, 9, 1], 4, 3, backend=backend) == [(0, 0), (2, 0), (2, 2), (4, 0)]


def test_refusals():
    with pytest.raises(PlanError, match="tile=0"):
        schedule([1], 0, 1)
    with pytest.raises(PlanError, match="num_workers=0"):
        schedule([1], 1, 0)
    with pytest.raises(PlanError, match=r"req is int32 \[2\]"):
        schedule([1], 1, 1, [0, 0])
