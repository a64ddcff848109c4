"""Decode rows on every rank against contexts grown token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.backends import BACKENDS
from cpkit.kernels.decode_lens import COLUMNS, DecodeRows, flat_decodes, native_decodes
from cpkit.topology import Shard
from tests import oracles
from tests.kernels.tensors import i32

backends = pytest.mark.parametrize("backend", BACKENDS)
ALONE = Shard()
ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=5)


def decode(kernel, rows, num_rows, width, shard=ALONE, **options):
    """The rows that a kernel writes over garbage, with block table 10 * request + column."""
    query_lens = [n for _, n in rows]
    tables = i32(np.arange(1, 1 + len(rows))[:, None] * 10 + np.arange(2))
    sizes = ((num_rows, width), (num_rows,), (num_rows,), (num_rows,), (num_rows, 2))
    out = DecodeRows(*(torch.full(size, -99, dtype=torch.int32) for size in sizes))
    kernel(i32(np.cumsum([0, *query_lens])), i32([n for n, _ in rows]), tables, shard, out=out, **options)
    return out


def keys(length, ratio, dcp_size, turn, rank):
    held = oracles.deal(20 // ratio, dcp_size, turn)[rank]
    return oracles.visible_keys(held, length - 1, ratio)


@backends
@settings(max_examples=20)
@given(
    rows=ROWS,
    padding=st.integers(0, 3),
    dcp_size=st.integers(1, 3),
    turn=st.integers(1, 2),
    ratio=st.sampled_from([1, 2, 4]),
)
def test_every_token_of_every_rank(backend, rows, padding, dcp_size, turn, ratio):
    lens = oracles.decode_lens(*zip(*rows, strict=True))
    total, longest = sum(map(len, lens)), max(map(len, lens))
    for rank in range(dcp_size):
        shard = Shard(dcp_size=dcp_size, dcp_rank=rank, interleave=ratio * turn)
        options = {"compress_ratio": ratio, "backend": backend}
        flat = decode(flat_decodes, rows, total + padding, 1, shard, **options)
        want = [(keys(n, ratio, dcp_size, turn, rank), n // ratio, req) for req, row in enumerate(lens) for n in row]
        want += [(0, 0, len(rows) + at) for at in range(padding)]
        assert (
            list(zip(flat.seq_lens[:, 0].tolist(), flat.global_seq_lens.tolist(), flat.req.tolist(), strict=True))
            == want
        )
        assert flat.query_lens.tolist() == [1] * (total + padding)
        blocks = [[10 * (req + 1), 10 * (req + 1) + 1] for req, row in enumerate(lens) for _ in row]
        assert flat.block_tables.tolist() == blocks + [[0, 0]] * padding

        native = decode(native_decodes, rows, len(rows) + padding, longest, shard, **options)
        for req, row in enumerate([*lens, *[[]] * padding]):
            seen = [keys(n, ratio, dcp_size, turn, rank) for n in row]
            assert native.seq_lens[req].tolist() == seen + [0] * (longest - len(row))
            assert native.query_lens[req] == len(row)
            assert native.global_seq_lens[req] == (row[-1] // ratio if row else 0)
            assert native.block_tables[req].tolist() == ([10 * (req + 1), 10 * (req + 1) + 1] if row else [0, 0])


@backends
def test_b67_localising_comes_after_the_expansion(backend):
    shard = Shard(dcp_size=2, dcp_rank=1)
    assert decode(flat_decodes, [(10, 3)], 3, 1, shard, backend=backend).seq_lens.flatten().tolist() == [4, 4, 5]
    assert decode(native_decodes, [(10, 3)], 1, 3, shard, backend=backend).seq_lens.tolist() == [[4, 4, 5]]


@backends
def test_strided_tables_are_read_by_row(backend):
    wide = i32(np.arange(1, 13).reshape(2, 6))
    out = DecodeRows(*(torch.zeros(shape, dtype=torch.int32) for shape in ((2, 1), 2, 2, 2, (2, 3))))
    flat_decodes(i32([0, 1, 2]), i32([4, 4]), wide[:, :3], ALONE, out=out, backend=backend)
    assert out.block_tables.tolist() == [[1, 2, 3], [7, 8, 9]]


@backends
@pytest.mark.parametrize("kernel", [flat_decodes, native_decodes])
@pytest.mark.parametrize("table_width", [0, 1, COLUMNS, COLUMNS + 1])
def test_blocks_of_tables(kernel, table_width, backend):
    """Five requests of one token, one row of padding, tables in a corner of a wider buffer."""
    tables = i32(np.arange(5 * table_width).reshape(5, table_width))
    wide = torch.full((7, table_width + 2), -99, dtype=torch.int32)
    lens = torch.full((6, 2), -99, dtype=torch.int32)
    others = (torch.full((6,), -99, dtype=torch.int32) for _ in range(3))
    out = DecodeRows(lens[:, :1], *others, wide[:6, :table_width])
    kernel(i32(range(6)), i32([4, 0, 9, 1, 7]), tables, ALONE, out=out, backend=backend)
    assert out.block_tables.tolist() == [*tables.tolist(), [0] * table_width]
    assert (wide[:, table_width:] == -99).all() and (wide[6] == -99).all()
    assert lens.tolist() == [[n, -99] for n in (4, 0, 9, 1, 7, 0)]
    assert out.global_seq_lens.tolist() == [4, 0, 9, 1, 7, 0]
    assert out.req.tolist() == list(range(6))


@backends
@pytest.mark.parametrize("kernel", [flat_decodes, native_decodes])
def test_stale_boundaries_are_read_inside_the_tables(kernel, backend):
    """Boundaries that end far behind the rows: every row is of some request, and nothing else is read."""
    tables = i32(np.arange(10).reshape(5, 2))[1:3]
    out = DecodeRows(*(torch.full(size, -99, dtype=torch.int32) for size in ((4, 1), (4,), (4,), (4,), (4, 2))))
    kernel(i32([0, 10**9, 2 * 10**9]), i32([2**31 - 1, 1]), tables, ALONE, out=out, backend=backend)
    assert {tuple(row) for row in out.block_tables.tolist()} <= {(2, 3), (4, 5), (0, 0)}


def test_refusals():
    with pytest.raises(ConfigError, match="interleave=2 is not a multiple of compress_ratio=4"):
        decode(flat_decodes, [(9, 1)], 1, 1, Shard(dcp_size=2, interleave=2), compress_ratio=4)
    with pytest.raises(PlanError, match=r"out.seq_lens is int32 \[2, 3\] on cpu: it must be int32 \[any, 1\]"):
        decode(flat_decodes, [(9, 2)], 2, 3)
    with pytest.raises(PlanError, match=r"query_start_loc is int32 \[2\] on cpu: it must be int32 \[3\]"):
        native_decodes(i32([0, 1]), i32([4, 4]), i32([[1], [2]]), ALONE, out=decode(native_decodes, [(9, 1)], 1, 1))
    with pytest.raises(PlanError, match="num_reqs=0"):
        native_decodes(i32([0]), i32([]), i32(np.zeros((0, 2))), ALONE, out=decode(native_decodes, [(9, 1)], 1, 1))
    with pytest.raises(ConfigError, match="flat_decodes with backend='cuda'"):
        decode(flat_decodes, [(9, 1)], 1, 1, backend="cuda")
