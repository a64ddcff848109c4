"""Fingerprints: pinned values, and no two different plans alike."""

from dataclasses import dataclass

import numpy as np
import pytest

from cpkit.digest import digest


@dataclass
class Pair:
    left: object
    right: object


@dataclass
class Couple:
    left: object
    right: object


PINNED = [
    pytest.param(None, "482f0c4212c14802", id="none"),
    pytest.param(0, "ac050f9fcf2d9f6b", id="zero"),
    pytest.param(True, "cf7b6294c702287c", id="true"),
    pytest.param(1 << 70, "1a326a4dbcc1111f", id="big"),
    pytest.param("head_tail", "12e2b981ce2903cd", id="text"),
    pytest.param("é", "5f574e78c08b4d3a", id="text-beyond-ascii"),
    pytest.param((), "3a3faf55661609e8", id="empty"),
    pytest.param(np.array([1, -1, 1 << 40]), "9f73491efa6c02e7", id="array"),
    pytest.param(np.zeros((0, 3), np.int32), "14ff3c6e16a843bd", id="empty-array"),
    pytest.param({"b": (1, "x"), "a": None}, "cfc2df6388dbb13e", id="dict"),
    pytest.param(Pair(1, np.array([2])), "3742714dde8ea25b", id="dataclass"),
]


@pytest.mark.parametrize(("value", "hexdigits"), PINNED)
def test_pinned(value, hexdigits):
    assert digest(value) == hexdigits


def test_all_pinned_values_differ():
    assert len({digest(param.values[0]) for param in PINNED}) == len(PINNED)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(1, True, id="one-and-true"),
        pytest.param(1, "1", id="one-and-text"),
        pytest.param(None, "None", id="none-and-text"),
        pytest.param((1, 2), (12,), id="joined"),
        pytest.param(((1,), 2), ((1, 2),), id="nested"),
        pytest.param(("a", "b;s1:c"), ("a;s1:b", "c"), id="separator-in-text"),
        pytest.param(("a;", "b"), ("a", ";b"), id="moved-separator"),
        pytest.param(np.array([[1, 2]]), np.array([[1], [2]]), id="shape"),
        pytest.param(np.array([1, 2]), np.array([2, 1]), id="order"),
        pytest.param(np.zeros((0, 2), int), np.zeros((0, 3), int), id="empty-shape"),
        pytest.param({"a": 1}, {"b": 1}, id="key"),
        pytest.param({4: ()}, {16: ()}, id="number-key"),
        pytest.param(Pair(1, 2), Pair(2, 1), id="field"),
        pytest.param(Pair(1, 2), Couple(1, 2), id="type"),
        pytest.param(np.array([1 << 40]), np.array([0]), id="beyond-32-bits"),
    ],
)
def test_different_values_differ(one, other):
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(np.array([1, 2], np.int32), np.array([1, 2], np.int64), id="width"),
        pytest.param(np.array([1, 2], ">i8"), np.array([1, 2], "<i8"), id="byte-order"),
        pytest.param(np.arange(6)[::2], np.array([0, 2, 4]), id="strides"),
        pytest.param(np.arange(4).reshape(2, 2).T, np.array([[0, 2], [1, 3]]), id="layout"),
        pytest.param(np.int64(5), 5, id="numpy-number"),
        pytest.param([1, 2], (1, 2), id="list-and-tuple"),
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="dict-order"),
    ],
)
def test_equal_values_agree(one, other):
    assert digest(one) == digest(other)


@pytest.mark.parametrize("value", [1.5, np.array([1.5]), np.float64(2), {1, 2}, object(), (1, [2.0])])
def test_floats_and_strangers_have_no_digest(value):
    with pytest.raises(TypeError, match="no digest for"):
        digest(value)
