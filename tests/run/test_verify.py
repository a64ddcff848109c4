"""How two tensors are compared."""

import numpy as np
import pytest
import torch

from cpkit.run.verify import compare


@pytest.mark.parametrize(
    ("found", "expected", "worst", "at"),
    [
        pytest.param([1.0, 2.0], [1.0, 2.0], 0.0, None, id="equal"),
        pytest.param([1.0, 2.5], [1.0, 2.0], 0.5, 1, id="beyond"),
        pytest.param([1.0, 2.25], [1.0, 2.0], 0.25, None, id="within"),
        pytest.param([np.nan, 9.0], [1.0, 2.0], 7.0, 0, id="nan-comes-first"),
        pytest.param([-np.inf, 2.0], [-np.inf, 2.0], 0.0, None, id="equal-infinities"),
        pytest.param([np.inf, 2.0], [-np.inf, 2.0], 0.0, 0, id="other-infinity"),
        pytest.param([1.0, 2.0], [1.0, -np.inf], 0.0, 1, id="keys-where-there-are-none"),
        pytest.param([], [], 0.0, None, id="empty"),
    ],
)
def test_compare(found, expected, worst, at):
    error, fault = compare("x", torch.tensor(found).double(), torch.tensor(expected).double(), 0.25)
    assert error == worst
    assert (fault is None) == (at is None)
    if fault is not None:
        assert fault.what == f"x [{at}]"
