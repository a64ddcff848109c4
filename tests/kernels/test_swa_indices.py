"""Window indices over garbage: hostile tables, positions without keys, refused shapes (worlds: tests/builders)."""

import numpy as np
import pytest
import torch

from cpkit.errors import PlanError
from cpkit.kernels.swa_indices import draft_swa_indices, swa_indices


def i32(values):
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def window(kernel=swa_indices, *, width=3, num_out=2, **change):
    """Two tokens at positions 2 and 3 of one request, window 3."""
    args = {
        "query_start_loc": i32([0, 2]),
        "seq_lens": i32([4]),
        "token_to_req": i32([0, 0]),
        "is_valid": torch.tensor([True, True]),
        "block_tables": i32([[5, 3]]),
        "block_size": 2,
        "window_size": 3,
        "token_offset": 0,
        "indices": torch.full((num_out, width), -99, dtype=torch.int32),
        "lens": torch.full((num_out,), -99, dtype=torch.int32),
        **change,
    }
    kernel(**args)
    return args["indices"].tolist(), args["lens"].tolist()


def test_the_drawn_example():
    assert window() == ([[10, 11, 6], [11, 6, 7]], [3, 3])
    assert window(draft_swa_indices, width=5) == ([[10, 11, 6, 7, -1]] * 2, [4, 4])


def test_rows_start_at_the_offset():
    assert window(num_out=1, token_offset=1) == ([[11, 6, 7]], [3])
    assert window(num_out=0, token_offset=2) == ([], [])


def test_wider_rows_are_padded():
    assert window(width=4)[0] == [[10, 11, 6, -1], [11, 6, 7, -1]]


def test_replay_hides_what_the_cache_lost():
    assert window(replay_start=i32([3])) == ([[-1, -1, -1], [7, -1, -1]], [0, 1])


@pytest.mark.parametrize(
    ("change", "indices", "lens"),
    [
        pytest.param({"seq_lens": i32([1])}, [[-1, -1, -1], [10, -1, -1]], [0, 1], id="before-position-0"),
        pytest.param({"block_tables": i32([[5]])}, [[10, 11, -1], [11, -1, -1]], [3, 3], id="behind-the-table"),
        pytest.param({"is_valid": torch.tensor([False, True])}, [[-1] * 3, [11, 6, 7]], [0, 3], id="invalid"),
        pytest.param({"block_tables": i32([[5, 3, 9, 9]])[:, :2]}, [[10, 11, 6], [11, 6, 7]], [3, 3], id="strided"),
    ],
)
def test_hostile_inputs(change, indices, lens):
    assert window(**change) == (indices, lens)


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
def test_refusals(change, message):
    with pytest.raises(PlanError, match=message):
        window(**change)
