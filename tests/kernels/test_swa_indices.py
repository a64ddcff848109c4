"""Window indices over garbage: hostile tables, positions without keys, refused shapes (worlds: tests/builders)."""

import numpy as np
import pytest
import torch

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS
from cpkit.kernels.swa_indices import COLUMNS, ROWS, WindowTokens, draft_swa_indices, swa_indices
from tests.kernels.tensors import i32

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def window(backend, kernel=swa_indices, *, width=3, num_out=2, **change):
    """Two tokens at positions 2 and 3 of one request, window 3."""
    batch = {
        "query_start_loc": i32([0, 2]),
        "seq_lens": i32([4]),
        "token_to_req": i32([0, 0]),
        "is_valid": torch.tensor([True, True]),
        "block_tables": i32([[5, 3]]),
        "block_size": 2,
    }
    options = {"window_size": 3, "token_offset": 0}
    options |= {name: change.pop(name) for name in options.keys() & change.keys()}
    indices, lens = (torch.full(size, -99, dtype=torch.int32) for size in ((num_out, width), (num_out,)))
    kernel(WindowTokens(**{**batch, **change}), **options, indices=indices, lens=lens, backend=backend)
    return indices.tolist(), lens.tolist()


def test_the_drawn_example(backend):
    assert window(backend) == ([[10, 11, 6], [11, 6, 7]], [3, 3])
    assert window(backend, draft_swa_indices, width=5) == ([[10, 11, 6, 7, -1]] * 2, [4, 4])


def test_rows_start_at_the_offset(backend):
    assert window(backend, num_out=1, token_offset=1) == ([[11, 6, 7]], [3])
    assert window(backend, num_out=0, token_offset=2) == ([], [])


def test_wider_rows_are_padded(backend):
    assert window(backend, width=4)[0] == [[10, 11, 6, -1], [11, 6, 7, -1]]


def test_replay_hides_what_the_cache_lost(backend):
    assert window(backend, replay_start=i32([3])) == ([[-1, -1, -1], [7, -1, -1]], [0, 1])


@pytest.mark.parametrize(
    ("change", "indices", "lens"),
    [
        pytest.param({"seq_lens": i32([1])}, [[-1, -1, -1], [10, -1, -1]], [0, 1], id="before-position-0"),
        pytest.param({"block_tables": i32([[5]])}, [[10, 11, -1], [11, -1, -1]], [3, 3], id="behind-the-table"),
        pytest.param({"is_valid": torch.tensor([False, True])}, [[-1] * 3, [11, 6, 7]], [0, 3], id="invalid"),
        pytest.param({"block_tables": i32([[5, 3, 9, 9]])[:, :2]}, [[10, 11, 6], [11, 6, 7]], [3, 3], id="strided"),
        pytest.param({"block_tables": i32([[-1, 3]])}, [[-1, -1, 6], [-1, 6, 7]], [3, 3], id="block-below-0"),
        pytest.param({"token_to_req": i32([7, 0])}, [[-1] * 3, [11, 6, 7]], [0, 3], id="request-behind-the-last"),
        pytest.param({"token_to_req": i32([-2, 0])}, [[-1] * 3, [11, 6, 7]], [0, 3], id="request-below-0"),
        pytest.param({"seq_lens": i32([2**31 - 1])}, [[-1] * 3] * 2, [3, 3], id="far-behind-the-table"),
    ],
)
def test_hostile_inputs(backend, change, indices, lens):
    assert window(backend, **change) == (indices, lens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"width": 2}, "window_size=3 in index rows of 2", id="narrow-rows"),
        pytest.param({"token_offset": 1}, r"tokens 1..3 of 2", id="behind-the-batch"),
        pytest.param({"block_tables": i32(np.zeros((1, 0)))}, "nothing to read", id="no-table"),
        pytest.param({"is_valid": i32([1, 1])}, "is_valid is int32", id="flags-as-numbers"),
        pytest.param({"replay_start": i32([0, 0])}, r"replay_start is int32 \[2\]", id="replay-of-others"),
        pytest.param({"block_size": 0}, "block_size=0", id="no-block-size"),
    ],
)
def test_refusals(backend, change, message):
    with pytest.raises(PlanError, match=message):
        window(backend, **change)


@pytest.mark.parametrize("num_tokens", [1, ROWS - 1, ROWS, ROWS + 1])
@pytest.mark.parametrize("width", [1, COLUMNS - 1, COLUMNS, COLUMNS + 1])
def test_blocks_of_tokens_and_keys(backend, num_tokens, width):
    """One request, as many window keys as an index row holds, in a corner of a larger buffer."""
    blocks, context = 40, 150 + num_tokens
    table = np.arange(blocks)[::-1].copy()
    wide = torch.full((num_tokens + 1, width + 3), -99, dtype=torch.int32)
    lens = torch.full((num_tokens,), -99, dtype=torch.int32)
    tokens = WindowTokens(
        i32([0, num_tokens]), i32([context]), i32([0] * num_tokens), torch.ones(num_tokens, dtype=torch.bool),
        i32([table]), block_size=5,
    )  # fmt: skip
    options = {"window_size": width, "token_offset": 0, "lens": lens, "backend": backend}
    swa_indices(tokens, indices=wide[:-1, :width], **options)
    for token in range(num_tokens):
        seen = list(range(context - num_tokens + token + 1))[-width:]
        assert wide[token, : len(seen)].tolist() == [int(table[pos // 5]) * 5 + pos % 5 for pos in seen]
        assert wide[token, len(seen) : width].tolist() == [-1] * (width - len(seen))
        assert lens[token] == len(seen)
    assert (wide[:, width:] == -99).all() and (wide[-1] == -99).all()
