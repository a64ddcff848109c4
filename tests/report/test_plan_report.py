"""The plan report at both ends: every number it shows is one that the plan holds."""

import re

import numpy as np
import pytest

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.report.plan_report import cache_bytes, numbers, plan_report, segments_text, slots_text
from cpkit.step import plan_step
from cpkit.topology import Topology
from cpkit.views.traffic import step_traffic


def make_plan(seq_lens, query_lens, topology, *, model="deepseek-v3.2", **options):
    loaded = load_model(model)
    return plan_step(Batch.from_lens(seq_lens, query_lens), topology, loaded, default_budget(loaded), **options)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0 1"),
        ([0, 1, 2], "0..2"),
        ([0, 4, 8], "0, 4 .. 8"),
        ([0, 2, 1, 3], "0 2 1 3"),
        ([5, 5, 5], "5 5 5"),
        ([9, *range(8)], "9 0 1 2 3 4 ... 7"),
    ],
)
def test_numbers(values, text):
    assert numbers(values) == text


def test_segments_text_is_cut_to_a_width():
    plan = make_plan([100] * 40, [1] * 40, Topology())
    text = segments_text(plan, plan.partition.segments(0))
    shown = text.count("[")
    assert text.endswith(f"... {40 - shown} more") and len(text) < 80
    idle = make_plan([3], [1], Topology(pcp=2))
    assert segments_text(idle, idle.partition.segments(1)) == "nothing"


@pytest.mark.parametrize(
    ("slots", "text"),
    [([], ""), ([0], "0"), ([18, 19, 20, 64], "18..20 64"), ([5, 4], "5 4"), ([1, 3, 5, 7, 9], "1 3 5 7 ...")],
)
def test_slots_text(slots, text):
    assert slots_text(np.array(slots, np.int64)) == text


def test_one_rank_shows_the_slots_it_writes():
    """block_size=2, dcp=2: keys 3..6 of blocks 7 and 9 lie at slots 15 and 18 of rank 1, 18 and 19 of rank 0."""
    model = load_model("deepseek-v3.2")
    batch = Batch.from_lens([7], [4], block_tables=[[7, 9]])
    plan = plan_step(batch, Topology(tp=2, dcp=2, block_size=2), model, default_budget(model))
    assert re.search(r"\n +0 +4 +2  18\.\.19\n", plan_report(plan, 0))
    assert re.search(r"\n +0 +3 +2  15 18\n", plan_report(plan, 1))


def test_a_null_block_inside_a_block_table_is_said_and_the_rest_is_shown():
    model = load_model("deepseek-v3.2")
    batch = Batch.from_lens([7, 2], [4, 2], block_tables=[[7, 0, 8, 3], [9]])
    plan = plan_step(batch, Topology(block_size=2), model, default_budget(model))
    text = plan_report(plan, 0)
    assert "null block" in text and "Collectives: none" in text


@pytest.mark.parametrize("model", ["deepseek-v3.2", "deepseek-v4-flash", "glm-5.3-flash"])
def test_cache_bytes_are_the_models(model):
    """Whole blocks of every ratio: bytes a token, times tokens."""
    plan = make_plan([128], [128], Topology(block_size=128), model=model)
    keys = {ratio: 128 // ratio for ratio in plan.shards}
    assert cache_bytes(plan, keys) == 128 * plan.model.kv_bytes()


def test_numbers_of_the_report_are_the_plans():
    plan = make_plan([900, 5000], [1, 4500], Topology(tp=2, pcp=2, dcp=4))
    text = plan_report(plan)
    lines = text.splitlines()
    for pcp_rank, tokens in enumerate(plan.partition.num_tokens.tolist()):
        assert any(
            re.match(rf"\s+{pcp_rank}\s+{2 * pcp_rank} {2 * pcp_rank + 1}\s+{tokens:,} ", line) for line in lines
        )
    for dcp_rank in range(4):
        keys = int(plan.shards[1].local_lens(dcp_rank).sum())
        assert any(re.match(rf"\s+{dcp_rank}\s+\d\s+{keys:,} ", line) for line in lines)
    assert "Tokens by position" not in text
    for (op, group), total in step_traffic(plan.collectives, plan.model).items():
        assert re.search(rf"{op} over {group} +{total.calls:,} ", text)


def test_chunks_and_their_shares_of_the_budgets():
    """4,500 x 5,000 logits are over 1 MiB: runs of 2^18 // 5,000 = 52 query tokens."""
    model = load_model("deepseek-v3.2")
    budget = default_budget(model, workspace_tokens=10_000, logits_bytes=1 << 20)
    plan = plan_step(Batch.from_lens([5000], [4500]), Topology(tp=2, dcp=2), model, budget)
    line = next(line for line in plan_report(plan).splitlines() if "[0:5000)" in line)
    assert "50.0%" in line and "87 x 52" in line and "1.0 MiB" in line and "99.2%" in line


def test_a_replica_of_a_larger_world_says_so():
    text = plan_report(make_plan([9], [9], Topology(dp=2, pp=3, tp=2)))
    assert "dp=2 pp=3 tp=2" in text and "shown for the first of 6" in text
