"""Owner strips against owners dealt out one by one."""

import itertools

import pytest

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.report.strip import computed_by, fits_strip, ruler, stored_by, strips
from cpkit.step import plan_step
from cpkit.topology import Topology

MODEL = load_model("deepseek-v3.2")


def make_plan(seq_lens, query_lens, *, partition="head_tail", **sizes):
    topology = Topology(**sizes)
    return plan_step(Batch.from_lens(seq_lens, query_lens), topology, MODEL, default_budget(MODEL), partition=partition)


@pytest.mark.parametrize(("dcp", "interleave"), [(2, 1), (4, 2), (8, 16)])
@pytest.mark.parametrize("seq_len", [1, 31, 32, 33, 100])
def test_stored_by(dcp, interleave, seq_len):
    plan = make_plan([seq_len], [1], tp=8, dcp=dcp, interleave=interleave)
    dealt = itertools.chain.from_iterable([str(rank)] * interleave for rank in itertools.cycle(range(dcp)))
    assert stored_by(plan) == ["".join(itertools.islice(dealt, seq_len))]


def test_without_dcp_every_rank_stores_every_key():
    assert stored_by(make_plan([5, 3], [1, 3], tp=2)) == ["*****", "***"]


@pytest.mark.parametrize(
    ("partition", "prefill"),
    [
        ("head_tail", "..0011110"),
        ("head_tail_even", "..0011110"),
        ("contiguous", "..0000111"),
        ("round_robin", "..0101010"),
    ],
)
def test_computed_by(partition, prefill):
    """7 query tokens behind 2; the decode is on every rank."""
    plan = make_plan([10, 9], [1, 7], tp=2, pcp=2, dcp=4, partition=partition)
    assert computed_by(plan) == [".........*", prefill]


def test_decodes_that_are_dealt_out_and_one_rank_alone():
    assert computed_by(make_plan([3, 4, 5], [1, 1, 1], pcp=2)) == ["..0", "...1", "....0"]
    assert computed_by(make_plan([3, 2], [1, 2])) == ["..0", "00"]


@pytest.mark.parametrize(
    ("start", "length", "marks"),
    [(0, 0, "0"), (0, 10, "0"), (0, 11, "0         10"), (80, 21, "80        90        100")],
)
def test_ruler(start, length, marks):
    assert ruler(start, length) == marks


def test_long_strips_wrap_under_their_own_ruler():
    lines = strips(make_plan([170], [1], tp=2, dcp=2))
    assert len(lines) == 9
    assert [line.split()[-1] for line in lines[::3]] == ["70", "150", "160"]
    letters = "".join(line.split()[-1] for line in lines[2::3])
    assert letters == "01" * 85


def test_only_small_steps_are_drawn():
    assert fits_strip(make_plan([640], [640]))
    assert not fits_strip(make_plan([641], [641]))
    assert not fits_strip(make_plan([2] * 13, [1] * 13))
    assert not fits_strip(make_plan([64], [64], tp=64, dcp=64))
