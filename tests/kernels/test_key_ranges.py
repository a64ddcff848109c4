"""Key ranges of prefill chunks against keys looked at one by one, in both layouts, with and without a span."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.backends import BACKENDS
from cpkit.kernels.key_ranges import BLOCK, ChunkRows, KeyRanges, key_ranges_gathered, key_ranges_local
from tests import oracles
from tests.kernels.tensors import i32

ROWS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=4)


def garbage(*size):
    return torch.full(size, -99, dtype=torch.int32)


def write(kernel, rows, starts, num_tokens, **options):
    """What a kernel writes over garbage for rows (tokens before, queries, stride) behind 3 other tokens."""
    chunk = ChunkRows(
        query_start_loc=i32(np.cumsum([3, *(new for _, new, _ in rows)])),
        seq_lens=i32([before + (1 + (new - 1) * stride if new else 0) for before, new, stride in rows]),
        region_start=torch.tensor(starts),
        key_start_loc=i32(np.arange(len(rows) + 1)),
        row_stride=i32([stride for *_, stride in rows]),
    )
    out = KeyRanges(garbage(num_tokens), garbage(num_tokens), garbage(0))
    kernel(chunk, out=out, **options)
    return list(zip(out.key_start.tolist(), out.key_end.tolist(), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25)
@given(
    rows=ROWS,
    dcp_size=st.integers(1, 3),
    turn=st.integers(1, 2),
    ratio=st.sampled_from([1, 2, 4]),
    span=st.none() | st.tuples(st.integers(0, 4), st.integers(1, 9)),
    skipped=st.integers(0, 3),
)
def test_ranges_hold_the_visible_keys(backend, rows, dcp_size, turn, ratio, span, skipped):
    first, stop = (0, 99) if span is None else (span[0], span[0] + span[1])
    tokens = [(row, before + at * stride) for row, (before, new, stride) in enumerate(rows) for at in range(new)]
    tokens = tokens[skipped:]
    options = {"token_start": 3 + skipped, "compress_ratio": ratio, "backend": backend}
    if span is not None:
        options["span"] = first, stop
    starts = [100 * row for row in range(len(rows))]

    def count(held, pos):
        return sum(first <= state < stop and (state + 1) * ratio <= pos + 1 for state in held)

    found = write(key_ranges_gathered, rows, starts, len(tokens), **options)
    assert found == [(100 * row, 100 * row + count(range(40), pos)) for row, pos in tokens]
    for rank in range(dcp_size):
        held = oracles.deal(40, dcp_size, turn)[rank]
        shard = {"dcp_size": dcp_size, "dcp_rank": rank, "interleave": turn * ratio}
        found = write(key_ranges_local, rows, starts, len(tokens), **shard, **options)
        assert found == [(100 * row, 100 * row + count(held, pos)) for row, pos in tokens]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_behind_the_last_row_see_nothing(backend):
    options = {"token_start": 3, "compress_ratio": 1, "backend": backend}
    found = write(key_ranges_gathered, [(4, 2, 1), (0, 1, 1)], [0, 8], 5, **options)
    assert found == [(0, 5), (0, 6), (8, 9), (8, 8), (8, 8)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [[2, 0, 1], [0, 0, 3], [4], [1, 0, 0], [BLOCK, 1, BLOCK - 1, 2]], ids=str)
def test_rows_of_keys(counts, backend):
    loc, lens = i32(np.arange(len(counts) + 1)), i32([1] * len(counts))
    chunk = ChunkRows(loc, lens, lens.long(), i32([0, *itertools.accumulate(counts)]))
    out = KeyRanges(garbage(0), garbage(0), garbage(sum(counts)))
    key_ranges_local(chunk, token_start=0, compress_ratio=1, out=out, backend=backend)
    assert out.key_rows.tolist() == [row for row, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_blocks_of_tokens(num_tokens, backend):
    """Three rows over as many programs as there are blocks, their buffers the middle of larger ones."""
    bounds = [0, num_tokens // 3, num_tokens // 3, num_tokens]
    lens = [10, 20, 30 + num_tokens]
    wide = garbage(3, num_tokens + 2)
    out = KeyRanges(wide[0, 1:-1], wide[1, 1:-1], wide[2, 1 : num_tokens + 1])
    starts = torch.tensor([0, 5, 7])
    chunk = ChunkRows(i32(bounds), i32(lens), starts, i32(bounds))
    key_ranges_gathered(chunk, token_start=0, compress_ratio=1, out=out, backend=backend)
    row = [0] * bounds[1] + [2] * (num_tokens - bounds[1])
    seen = [max(lens[r] - bounds[r + 1] + token + 1, 0) for token, r in enumerate(row)]
    assert out.key_start.tolist() == [int(starts[r]) for r in row]
    assert out.key_end.tolist() == [int(starts[r]) + n for r, n in zip(row, seen, strict=True)]
    assert out.key_rows.tolist() == row
    assert wide[:, 0].tolist() == wide[:, -1].tolist() == [-99] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_at_the_end_of_int32(backend):
    """The last of 2 tokens at position 2^31 - 2; a span far in front of it; a stride whose product passes 2^31."""
    last = 2**31 - 1
    chunk = ChunkRows(i32([0, 2, 4]), i32([last, last]), torch.tensor([0, 5]), i32([0, 0, 0]), i32([1, 2**30]))
    out = KeyRanges(garbage(4), garbage(4), garbage(0))
    key_ranges_gathered(chunk, token_start=0, compress_ratio=1, out=out, backend=backend)
    assert out.key_end.tolist()[:3] == [last - 1, last, 5 + 2**30 - 1]
    span = {"span": (last - 5, last)}
    key_ranges_local(chunk, token_start=0, compress_ratio=1, dcp_size=2, dcp_rank=1, out=out, **span, backend=backend)
    assert out.key_end.tolist() == [2, 2, 5, 7]


def test_region_starts_beyond_int32_would_wrap_so_they_come_as_int64():
    chunk = ChunkRows(i32([0, 1]), i32([1]), i32([0]), i32([0, 1]))
    with pytest.raises(PlanError, match="region_start is int32"):
        key_ranges_gathered(chunk, token_start=0, compress_ratio=1, out=KeyRanges(i32([0]), i32([0]), i32([])))


def test_a_state_on_two_ranks_is_refused():
    with pytest.raises(ConfigError, match="interleave=2 is not a multiple of compress_ratio=4"):
        write(key_ranges_local, [(0, 1, 1)], [0], 1, token_start=3, compress_ratio=4, dcp_size=2, interleave=2)


def test_a_backend_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="key_ranges_gathered with backend='cuda'"):
        write(key_ranges_gathered, [(0, 1, 1)], [0], 1, token_start=3, compress_ratio=1, backend="cuda")
