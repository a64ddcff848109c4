"""Whole numbers in, exactly those out; anything else is refused by name."""

import numpy as np
import pytest

from cpkit.arrays import MAX_LEN, MAX_LENS, as_ints, as_lens, ceil_div, freeze, prefix_sum, seal, spread
from cpkit.errors import PlanError


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], id="empty-list"),
        pytest.param([0, 1, 5], id="list"),
        pytest.param((3, 4), id="tuple"),
        pytest.param(range(3), id="range"),
        pytest.param([np.int64(7), np.uint8(1)], id="numpy-items"),
        pytest.param([(1 << 40), 0], id="longest"),
        pytest.param(np.array([2, 3], np.uint64), id="unsigned-array"),
        pytest.param(np.array([2, 3], ">i4"), id="big-endian"),
        pytest.param(np.arange(9)[::2], id="strided"),
    ],
)
def test_whole_numbers_are_kept(values):
    out = as_lens("lens", values, PlanError)
    assert (out.dtype, out.tolist()) == (np.int64, [int(value) for value in values])
    assert out.flags.c_contiguous and not out.flags.writeable


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param([1, 2.5], r"lens holds 2\.5: .*whole numbers that fit 64 bits", id="float"),
        pytest.param([1, 2.0], r"lens holds 2\.0", id="whole-float"),
        pytest.param([1, float("nan")], "lens holds nan", id="nan"),
        pytest.param([1, float("inf")], "lens holds inf", id="inf"),
        pytest.param([1, True], "lens holds True", id="bool-among-ints"),
        pytest.param([True, False], "lens holds True", id="bools"),
        pytest.param([3, np.False_], "lens holds .*False", id="numpy-bool"),
        pytest.param(np.array([True]), "lens holds True", id="bool-array"),
        pytest.param([1, None], "lens holds None", id="none"),
        pytest.param([1, "2"], "lens holds '2'", id="string-item"),
        pytest.param(["a"], "lens holds 'a'", id="strings"),
        pytest.param([1 << 63], "lens holds 9223372036854775808", id="one-above-int64"),
        pytest.param([1 << 63, -1], "lens holds 9223372036854775808", id="would-become-a-float"),
        pytest.param([1, 10**400], "lens holds 10000", id="huge"),
        pytest.param([10**400, 1.5], "lens holds 10000", id="huge-and-float"),
        pytest.param(np.array([1 << 63], np.uint64), "lens holds 9223372036854775808", id="unsigned-above-int64"),
        pytest.param([[1], [2, 3]], "lens is ragged", id="ragged"),
        pytest.param([[1, 2]], "lens has 2 dimensions", id="nested"),
        pytest.param(5, "lens has 0 dimensions", id="scalar"),
        pytest.param(None, "lens has 0 dimensions", id="no-list"),
        pytest.param("12", "lens has 0 dimensions", id="string"),
        pytest.param({"a": 1}, "lens has 0 dimensions", id="object"),
        pytest.param([4, -1], r"lens\[1\]=-1: a length is between 0 and 2\^40", id="negative"),
        pytest.param([4, MAX_LEN + 1], r"lens\[1\]=1099511627777: ", id="too-long"),
        pytest.param([-(1 << 62)], r"lens\[0\]=-4611686018427387904", id="far-negative"),
    ],
)
def test_anything_else_is_refused(values, words):
    with pytest.raises(PlanError, match=words):
        as_lens("lens", values, PlanError)


def test_sums_of_lengths_stay_inside_64_bits():
    most = np.full(MAX_LENS, MAX_LEN)
    assert prefix_sum(as_lens("lens", most, PlanError))[-1] == 1 << 60
    with pytest.raises(PlanError, match=r"lens has 1048577 entries: at most 1048576"):
        as_lens("lens", np.append(most, 1), PlanError)


def test_ids_may_be_any_64_bits():
    assert as_ints("ids", [-(1 << 63), (1 << 63) - 1], PlanError).tolist() == [-(1 << 63), (1 << 63) - 1]


def test_frozen_values_belong_to_the_plan():
    mine = np.array([1, 2])
    frozen = freeze(mine)
    mine[0] = 9
    assert frozen.tolist() == [1, 2]
    assert freeze(frozen) is frozen
    with pytest.raises(ValueError, match="read-only"):
        frozen[0] = 3
    fresh = np.array([3])
    assert seal(fresh) is fresh and not fresh.flags.writeable


@pytest.mark.parametrize("lens", [[], [0], [2, 0, 3], [1 << 40, 1 << 40, 5]])
def test_prefix_sum(lens):
    assert prefix_sum(np.array(lens, np.int64)).tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]


@pytest.mark.parametrize("lens", [[], [0, 0], [2, 0, 3], [0, 5, 0], [1]])
@pytest.mark.parametrize("moved", [False, True])
def test_spread(lens, moved):
    starts = [100 * i - 50 for i in range(len(lens))] if moved else [0] * len(lens)
    truth = [start + i for n, start in zip(lens, starts, strict=True) for i in range(n)]
    given = np.array(starts, np.int64) if moved else None
    assert spread(np.array(lens, np.int64), given).tolist() == truth


@pytest.mark.parametrize(
    ("a", "b", "up"), [(0, 5, 0), (1, 5, 1), (5, 5, 1), (6, 5, 2), ((1 << 40) + 1, 2, (1 << 39) + 1)]
)
def test_ceil_div(a, b, up):
    assert ceil_div(a, b) == up == ceil_div(np.array([a]), b).item()
