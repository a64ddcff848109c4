"""What may travel, refused on the rank itself before it meets another; sums in a fixed order."""

import pytest
import torch

from cpkit.comm.contract import reduce_in_order
from cpkit.comm.simulated import run_ranks
from cpkit.errors import ConfigError, PlanError
from cpkit.topology import Topology

PAIR = Topology(tp=2, dcp=2)


@pytest.mark.parametrize(
    ("op", "tensor", "says"),
    [
        pytest.param("all_gather", [1, 2], "takes a torch tensor, not list", id="no-tensor"),
        pytest.param("all_gather", torch.zeros(4, 4).t(), "call .contiguous", id="transposed"),
        pytest.param("all_gather", torch.zeros(()), "has 0 dimensions", id="scalar"),
        pytest.param("all_gather", torch.zeros([1] * 9), "has 9 dimensions", id="nine-dims"),
        pytest.param("all_gather", torch.zeros(2, dtype=torch.complex64), "of complex64: it takes uint8", id="complex"),
        pytest.param("all_gather", torch.zeros(2, device="meta"), "on meta, this rank on cpu", id="other-device"),
        pytest.param("all_to_all", torch.zeros(3, 2), "does not divide by the 2 ranks", id="odd-all-to-all"),
        pytest.param("reduce_scatter", torch.zeros(3, 2), "does not divide by the 2 ranks", id="odd-reduce-scatter"),
        pytest.param("reduce_scatter", torch.zeros(2, dtype=torch.bool), "of bool: it takes", id="sum-of-bool"),
        pytest.param("all_reduce", torch.zeros(2, dtype=torch.float8_e4m3fn), "of float8_e4m3fn", id="sum-of-fp8"),
    ],
)
def test_a_tensor_that_cannot_travel_is_refused(op, tensor, says):
    with pytest.raises(PlanError, match=says):
        run_ranks(PAIR, lambda comm: getattr(comm, op)(tensor, "dcp", what="x"))


@pytest.mark.parametrize("what", ["", "two words", "9lives", "é", "x" * 65])
def test_what_is_a_short_name(what):
    with pytest.raises(PlanError, match="name the data"):
        run_ranks(PAIR, lambda comm: comm.all_gather(torch.zeros(1), "dcp", what=what))


def test_unknown_group_and_reduction():
    with pytest.raises(ConfigError, match="no group 'ep': the groups are world, dp, pp, pcp, tp, dcp"):
        run_ranks(PAIR, lambda comm: comm.all_gather(torch.zeros(1), "ep", what="x"))
    with pytest.raises(PlanError, match="reduction='mean': use one of sum, min, max"):
        run_ranks(PAIR, lambda comm: comm.all_reduce(torch.zeros(1), "dcp", what="x", reduction="mean"))


def test_a_group_of_one_is_checked_like_any_other():
    with pytest.raises(PlanError, match="contiguous"):
        run_ranks(PAIR, lambda comm: comm.all_gather(torch.zeros(4, 4).t(), "pcp", what="x"))


def test_results_carry_no_gradient():
    ones = torch.ones(2, requires_grad=True)
    for results in run_ranks(PAIR, lambda comm: [comm.all_gather(ones, name, what="x") for name in ("dcp", "pcp")]):
        assert not any(result.requires_grad for result in results)


def test_sums_follow_the_order_given():
    big, small = torch.tensor([1e8]), torch.tensor([3.0])  # 1e8 + 3 is 1e8 in float32
    assert reduce_in_order([small, small, big], "sum").item() == 100_000_008
    assert reduce_in_order([big, small, small], "sum").item() == 100_000_000


def test_short_floats_round_once():
    parts = [torch.tensor([1.0], dtype=torch.bfloat16), *[torch.tensor([2.0**-9], dtype=torch.bfloat16)] * 4]
    total = reduce_in_order(parts, "sum")
    assert total.dtype == torch.bfloat16 and total.item() == 1 + 2.0**-7


@pytest.mark.parametrize(("reduction", "expected"), [("sum", [5, 250]), ("min", [1, 100]), ("max", [4, 150])])
def test_reductions_of_bytes(reduction, expected):
    parts = [torch.tensor([1, 100], dtype=torch.uint8), torch.tensor([4, 150], dtype=torch.uint8)]
    total = reduce_in_order(parts, reduction)
    assert total.dtype == torch.uint8 and total.tolist() == expected
    assert parts[0].tolist() == [1, 100]  # the inputs stay
