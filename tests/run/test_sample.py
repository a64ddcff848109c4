"""Which tokens of a long step are verified."""

import pytest
import torch

from cpkit.batch import Batch
from cpkit.run.sample import MOST_OTHERS, MOST_ROW_BORDERS, MOST_SHARD_BORDERS, sample_tokens
from cpkit.run.steps import batch_steps
from cpkit.worker.places import Places
from tests.worker.worlds import Case


def places(world, seq_lens, query_lens, **budget):
    case = Case("dsa", 16, world, budget={"max_num_batched_tokens": 4096, **budget})
    steps = batch_steps(Batch.from_lens(seq_lens, query_lens), case.settings, "x")
    plan = case.settings.plan(steps.batches[0], 0)
    return Places(plan, plan.ranks[0], torch.device("cpu"))


@pytest.mark.parametrize("world", [{}, {"tp": 2, "dcp": 2}, {"pcp": 2, "dcp": 2}], ids=["alone", "dcp", "pcp-dcp"])
def test_sample_has_the_borders(world):
    one = places(world, [500, 2000], [1, 2000])
    found = sample_tokens(one, seed=3)
    assert found.tolist() == sorted(set(found.tolist()))
    assert {0, one.num_tokens - 1} <= set(found.tolist())
    assert len(found) <= 2 + MOST_ROW_BORDERS + MOST_SHARD_BORDERS + MOST_OTHERS
    turn = 16 * world.get("dcp", 1)
    assert sum(int(at) % turn in (0, turn - 1) for at in one.position[found]) >= MOST_SHARD_BORDERS
    loc = one.rank.rows.query_start_loc.tolist()
    assert set(loc[:-1]) | {at - 1 for at in loc[1:]} <= set(found.tolist())
    assert (found == sample_tokens(one, seed=3)).all() and (found != sample_tokens(one, seed=4)[: len(found)]).any()


def test_sample_of_few_tokens_is_all_of_them():
    assert sample_tokens(places({}, [5], [3]), seed=0).tolist() == [0, 1, 2]
    assert sample_tokens(places({"pcp": 4}, [1], [1]), seed=0).tolist() in ([0], [])


def test_runs_of_chunks_are_borders():
    one = places({}, [60], [60], logits_bytes=4 * 60 * 20)
    assert {0, 19, 20, 39, 40, 59} <= set(sample_tokens(one, seed=0).tolist())
