"""Known faults on planted values: scores, keys and sinks are chosen, so the right answer can be written down."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from cpkit.activations.generate import Generated
from cpkit.comm.simulated import run_ranks
from cpkit.worker.program import RankProgram
from cpkit.worker.token_activations import TokenActivations
from tests.worker.worlds import Case, findings


@dataclass(frozen=True)
class Planted:
    """Generated activations but for what is planted: scores of keys by position, or all of a stream one number."""

    scores: tuple[float, ...] = ()
    whole: tuple[tuple[str, float], ...] = ()
    data: str = "exact"

    def rows(self, stream, layer, req, position, dim):
        out = Generated().rows(stream, layer, req, position, dim)
        if self.scores and stream == "index_weights":
            return torch.ones_like(out)
        if self.scores and stream == "index_key":
            out = torch.zeros_like(out)
            out[:, 0] = torch.tensor(self.scores)[position]
        return torch.full_like(out, dict(self.whole)[stream]) if stream in dict(self.whole) else out

    def heads(self, stream, layer, req, position, dim, heads):
        out = Generated().heads(stream, layer, req, position, dim, heads)
        if self.scores and stream == "index_query":
            out = torch.zeros_like(out)
            out[:, :, 0] = 1.0
        return torch.full_like(out, dict(self.whole)[stream]) if stream in dict(self.whole) else out


def last_results(case, activations):
    """Of every rank, the places and the first layer's result of the last step."""
    steps, settings = case.steps, case.settings
    source = TokenActivations(activations, steps.content, settings.model.num_heads)

    def program(comm):
        ranks = RankProgram(comm, settings, steps.pool, source)
        for batch in steps.batches:
            result = ranks.run_step(settings.plan(batch, comm.rank))
        return result.places, result.layers[0]

    return run_ranks(settings.topology, program, timeout_s=60)


def chosen_at(position, case, scores):
    """The keys that a position chose in the last step, of every rank that computed it."""
    return [
        sorted(key for key in result.selection[row].tolist() if key >= 0)
        for places, result in last_results(case, Planted(scores))
        for row in (places.position == position).nonzero()[0].tolist()
    ]


DCP2 = {"tp": 2, "dcp": 2}
BOTH2 = {"pcp": 2, "dcp": 2}
DECODE_8 = {"prompts": (7,), "decodes": 1}  # the last step decodes position 7, over 8 keys


@pytest.mark.parametrize("world", [DCP2, BOTH2, {"pcp": 2}], ids=["dcp", "pcp-dcp", "pcp"])
@pytest.mark.parametrize(
    ("interleave", "scores", "best"),
    [
        pytest.param(1, (9, 1, 8, 2, 7, 3, 6, 4), [0, 2, 4, 6], id="b99-all-best-on-one-rank"),
        pytest.param(2, (1, 2, 8, 9, 3, 4, 7, 6), [2, 3, 6, 7], id="b103-local-ids-become-global"),
        pytest.param(1, (5, 5, 5, 5, 5, 5, 5, 5), [0, 1, 2, 3], id="b97-equal-scores-lowest-first"),
        pytest.param(4, (0, 0, 0, 1, 0, 0, 0, 1), [0, 1, 3, 7], id="b97-ties-at-the-last-place"),
    ],
)
def test_global_selection(world, interleave, scores, best):
    case = Case("dsa", interleave, world, topk=4, **DECODE_8)
    found = chosen_at(7, case, scores)
    assert found == [best] * len(found) and found


def test_b101_lanes_beyond_the_length_name_no_key():
    case = Case("dsa", 1, DCP2, prompts=(2,), decodes=1)
    for _, result in last_results(case, Generated()):
        ((row,),) = [result.selection.tolist()]
        assert sorted(row[:3]) == [0, 1, 2] and row[3:] == [-1] * 5


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
@pytest.mark.parametrize(
    "world", [{}, DCP2, BOTH2, {"tp": 2, "pcp": 2, "dcp": 4}], ids=["alone", "dcp", "pcp-dcp", "all"]
)
def test_b109_sink_is_counted_once(world, merge):
    """Two states and a window of 9, all of logit 0 and value 1, beside a sink of logit 0: 11 / 12."""
    whole = (("query", 0.0), ("latent", 1.0), ("window", 1.0), ("sink", 0.0))
    case = Case("c4a", 16, world, merge, prompts=(10,), decodes=1)
    assert case.model.layers[0].window_size == 9
    for places, result in last_results(case, Planted(whole=whole)):
        assert places.position.tolist() == [10]
        torch.testing.assert_close(result.out, torch.full_like(result.out, 11 / 12))


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
def test_b123_lse_is_natural(merge):
    """5 keys of logit 0: log 5, not log2 5."""
    case = Case("dsa", 1, DCP2, merge, prompts=(4,), decodes=1)
    for _, result in last_results(case, Planted(whole=(("query", 0.0),))):
        torch.testing.assert_close(result.lse, torch.full_like(result.lse, math.log(5)))


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
@pytest.mark.parametrize("kind", ["dsa", "c4a"])
def test_b121_empty_shards_leave_no_trace(kind, merge):
    """Turns of 64 tokens: of prompts up to 9 tokens the first of 4 ranks stores all, the others' caches are all NaN."""
    case = Case(kind, 64, {"tp": 4, "dcp": 4}, merge, prompts=(9, 1), decodes=2)
    assert findings(case).rows
    for _, result in last_results(case, Generated()):
        assert bool(result.out.isfinite().all())


@pytest.mark.parametrize("partition", ["head_tail", "contiguous", "round_robin"])
@pytest.mark.parametrize("kind", ["dsa", "c4a", "swa"])
def test_b25_ranks_with_padding_only(kind, partition):
    """A prompt of 2 tokens on 4 PCP ranks: some have nothing to compute, and enter every collective."""
    case = Case(kind, 64, {"pcp": 4}, partition=partition, prompts=(2,), decodes=1)
    counts = [places.num_tokens for places, _ in last_results(replace(case, decodes=0), Generated())]
    assert sorted(counts) == [0, 0, 1, 1]
    assert findings(case).rows


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("world", [DCP2, BOTH2, {"pcp": 2}], ids=["dcp", "pcp-dcp", "pcp"])
def test_draft_rows_see_no_more_than_their_own_position(world, num_drafts):
    """Several query tokens a decode; rejected drafts are written again by the next step."""
    budget = {"num_speculative_tokens": num_drafts}
    case = Case("dsa", 1, world, prompts=(9, 2), decodes=5, budget=budget)
    assert (
        max(int(batch.query_lens[: batch.num_decodes].max(initial=0)) for batch in case.steps.batches) == 1 + num_drafts
    )
    assert findings(case).rows


@pytest.mark.parametrize("world", [{}, {"tp": 2, "dcp": 2}, {"pcp": 2}], ids=str)
def test_b113_b115_pools_and_tails_are_attended_together(world):
    """Rows of 3 and 42 tokens in one step, pools of 16: no pool and a tail of 3; two pools, of 4 asked for, and 10."""
    case = Case("kpool", 16, world, prompts=(3, 42), decodes=0, topk=4)
    picked = {}
    for places, result in last_results(case, Generated()):
        for req, position, row in zip(places.req, places.position, result.selection, strict=True):
            picked.setdefault((int(req), int(position)), set()).add(tuple(sorted(row.tolist())))
    assert picked[0, 2] == {(-1, -1, -1, -1)} and picked[1, 41] == {(-1, -1, 0, 1)}
    found = findings(case)
    copies = found.rows / 45
    assert found.keys == copies * (sum(range(1, 4)) + sum(range(1, 43)))  # nothing is left out below 4 whole pools
