"""The same steps by both backends: on exact data the same keys, and the same bits of the outputs."""

import pytest

pytest.importorskip("triton")

from cpkit.activations.generate import Generated
from cpkit.batch import Batch
from cpkit.errors import ConfigError
from cpkit.run.execute import RunOptions, execute
from cpkit.run.steps import batch_steps
from tests.worker.worlds import Case, run

LONG = Batch.from_lens([540, 700], [2, 3], [538, 700])
"""A decode with a draft token and the end of a prefill, both of more keys than are picked."""
SIZES = {"topk": 512, "index_heads": 32}


SPANS = {**SIZES, "budget": {"workspace_tokens": 512}}
"""Key spans of the longer request: candidates are joined before they are exchanged."""


@pytest.mark.parametrize(
    "case",
    [
        Case("dsa", 1, {"pcp": 2, "dcp": 2}, **SIZES),
        Case("dsa", 64, {"tp": 2, "dcp": 2}, merge="a2a", **SIZES),
        pytest.param(Case("dsa", 1, {"tp": 4, "dcp": 4}, **SPANS), marks=pytest.mark.slow),
        pytest.param(Case("dsa", 16, {"tp": 2, "pcp": 2, "dcp": 4}, merge="a2a", **SPANS), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_backends_select_the_same_keys(case):
    told = {}
    for backend in ("torch", "triton"):
        options = RunOptions(comm="sim", verify="all", backend=backend)
        _, reports = execute(batch_steps(LONG, case.settings, "long"), case.settings, Generated(7, "exact"), options)
        assert all(report.findings.first is None and report.findings.keys for report in reports)
        told[backend] = [(report.selections, report.outputs) for report in reports]
    assert told["torch"] == told["triton"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        pytest.param({**SIZES, "index_heads": 2}, "with 2 index heads .* take 32, 64; backend='torch'", id="heads"),
        pytest.param({**SIZES, "topk": 8}, "with 8 keys picked", id="k"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_refused_before_the_first_step(sizes, message):
    with pytest.raises(ConfigError, match=message):
        run(Case("dsa", 1, {}, **sizes), backend="triton")


def test_pages_that_the_decode_kernel_does_not_take_are_refused():
    """A V4 block of 64 tokens holds 16 states of ratio 4."""
    with pytest.raises(ConfigError, match=r"with 16 keys of a cache block .* take 64"):
        run(Case("c4a", 16, {}, **SIZES), backend="triton")


def test_unknown_backends_are_refused():
    with pytest.raises(ConfigError, match="backend='cuda'"):
        run(Case("dsa", 1, {}), backend="cuda")


def test_a_way_to_gather_that_nothing_would_use_is_refused():
    case = Case("dsa", 1, {"tp": 2, "dcp": 2}, **SIZES)
    options = RunOptions(comm="sim", verify="none", gather="symmetric")
    with pytest.raises(ConfigError, match=r"gather symmetric: pcp=1 dcp=2 .* leave gather out"):
        execute(batch_steps(LONG, case.settings, "long"), case.settings, Generated(7, "exact"), options)
