"""Limits of a step: units, defaults, and values that are refused."""

import pytest

from cpkit.budget import Budget, default_budget
from cpkit.errors import ConfigError
from cpkit.model import load_model


def test_units():
    budget = Budget(workspace_tokens=1024, logits_bytes=4103, num_speculative_tokens=3)
    assert (budget.logits, budget.decode_threshold) == (1025, 4)
    assert (budget.workspace_keys(1), budget.workspace_keys(4), budget.workspace_keys(2048)) == (1024, 256, 0)


def test_defaults():
    budget = default_budget(load_model("deepseek-v3.2"), max_num_seqs=7)
    assert budget == Budget(40 * 163_840, 512 << 20, max_num_batched_tokens=8192, max_num_seqs=7)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        pytest.param({"workspace_tokens": 0}, r"workspace_tokens=0: it is a whole number from 1 to 2\^50", id="zero"),
        pytest.param({"logits_bytes": 3}, r"logits_bytes=3: .* from 4 to", id="below-one-logit"),
        pytest.param({"num_speculative_tokens": -1}, r"num_speculative_tokens=-1: .* from 0 to", id="negative"),
        pytest.param({"max_num_seqs": 2.0}, r"max_num_seqs=2\.0", id="float"),
        pytest.param({"max_num_batched_tokens": True}, "max_num_batched_tokens=True", id="bool"),
        pytest.param({"logits_bytes": float("nan")}, "logits_bytes=nan", id="nan"),
        pytest.param({"workspace_tokens": (1 << 50) + 1}, "workspace_tokens=1125899906842625", id="too-large"),
        pytest.param({"max_num_seqs": None}, "max_num_seqs=None", id="none"),
    ],
)
def test_limits_that_are_refused(limits, words):
    with pytest.raises(ConfigError, match=words):
        Budget(**{"workspace_tokens": 1, **limits})
