"""What happens when ranks do other things than planned, or values are wrong: it is told, with the place."""

from dataclasses import replace

import pytest
import torch

from cpkit.activations.generate import Generated
from cpkit.comm.simulated import run_ranks
from cpkit.errors import ConfigError, DesyncError, PlanError
from cpkit.kernels.merge_lse import apply_sink
from cpkit.oracle import Oracle
from cpkit.run.verify import Verifier
from cpkit.worker import heads, select
from cpkit.worker.caches import LayerCaches
from cpkit.worker.program import RankProgram
from cpkit.worker.token_activations import TokenActivations
from tests.worker.worlds import Case, run

WORLD = {"tp": 2, "pcp": 2, "dcp": 4}
CASE = Case("dsa", 1, WORLD, prompts=(30, 3), decodes=1)
V4 = Case("c4a", 16, WORLD, prompts=(40, 3), decodes=1)


def first_step(case, plan_of):
    """The first step on all ranks, planned by plan_of(comm, batch)."""
    steps, settings = case.steps, case.settings
    source = TokenActivations(Generated(), steps.content, settings.model.num_heads)

    def program(comm):
        return RankProgram(comm, settings, steps.pool, source).run_step(plan_of(comm, steps.batches[0]))

    return run_ranks(settings.topology, program, timeout_s=60)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda one: one[1:], "issued was all_gather of kv_latent over pcp", id="one-left-out"),
        pytest.param(lambda one: (*one, one[-1]), "nothing more was issued", id="one-too-many"),
        pytest.param(lambda one: (one[1], one[0], *one[2:]), "the plan has all_gather of index_key", id="order"),
        pytest.param(
            lambda one: (replace(one[0], elements=5), *one[1:]), "over pcp, 5 bfloat16, issued was", id="size"
        ),
    ],
)
def test_rank_is_held_to_the_plans_collectives(change, words):
    def plan_of(comm, batch):
        plan = CASE.settings.plan(batch, comm.rank)
        layers = plan.collectives.layers
        return replace(plan, collectives=replace(plan.collectives, layers=(change(layers[0]), *layers[1:])))

    with pytest.raises(DesyncError, match=words):
        first_step(CASE, plan_of)


def broken(monkeypatch, owner, name, change):
    """Replace a function by change(its result)."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: change(right(*args, **options), *args))


def first_mismatch(case):
    found = [report.findings for report in run(case)]
    assert sum(one.num_mismatches for one in found)
    return next(one.first for one in found if one.first)


def test_wrong_selection_is_told(monkeypatch):
    def swap(found, *_):
        scores, positions = found
        return scores, torch.where(positions == 0, -1, positions)

    broken(monkeypatch, select, "best_of_packed", swap)
    first = first_mismatch(CASE)
    assert first.what == "selection" and (first.layer, first.kind) == (0, "dsa")
    assert str(first).startswith("step 1, layer 0 (dsa), request 1, token 3, rank 0: selection is [")
    assert str(first).endswith("3 keys, the oracle has 4 keys of 4")


def test_sink_applied_in_every_shard_is_told(monkeypatch):
    def twice(out, _, lse, sink):
        return apply_sink(out, lse, sink)

    broken(monkeypatch, heads, "apply_sink", twice)
    first = first_mismatch(V4)
    assert first.what.startswith("output [") and first.step == 1


def test_keys_written_to_another_slot_are_told(monkeypatch):
    right = LayerCaches.insert_window
    monkeypatch.setattr(LayerCaches, "insert_window", lambda self, rows, slots: right(self, rows, slots.roll(1)))
    assert first_mismatch(V4).what.startswith("LSE")


def test_hidden_rows_out_of_order_are_told(monkeypatch):
    from cpkit.worker import program

    broken(monkeypatch, program, "gather_hidden", lambda hidden, *_: hidden.roll(1, 0))
    assert first_mismatch(CASE).what.startswith("hidden row, value")


def test_random_data_allows_rounding_and_no_more():
    """Scores of random data: a key may be exchanged for the worst chosen one only within the rounding of its sums."""
    case = replace(CASE, data="random")
    source = TokenActivations(Generated(7, "random"), case.steps.content, case.model.num_heads)
    verifier = Verifier(Oracle(source), 0, "all", 0)
    truth = verifier.oracle.about(case.model, 0, [(token := _token(0, 29))], range(1))
    scores = truth.scores(0)
    wanted = scores.best(8)
    other = next(key for key in range(token.position) if key not in wanted.tolist())
    assert not scores.allows({int(wanted[-1])}, {other}, wanted)
    close = replace(scores, values=scores.values.clone())
    close.values[other] = close.values[wanted[-1]] - scores.errors[other]
    assert close.allows({int(wanted[-1])}, {other}, wanted)


def _token(req_id, position):
    from cpkit.oracle import Token

    return Token(req_id, position)


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        pytest.param(Case("dsa", 1, {"dp": 2}), ConfigError, "dp=2 pp=1: a run executes one layer", id="replicas"),
        pytest.param(
            Case("dsa", 1, {"pcp": 2, "dcp": 2}, shard=True),
            ConfigError,
            "shard_decode_requests with dcp=2",
            id="decodes",
        ),
        pytest.param(
            Case("dsa", 1, {"tp": 2, "dcp": 2}, budget={"workspace_tokens": 1}),
            PlanError,
            "no key span fits",
            id="workspace",
        ),
    ],
)
def test_what_cannot_run_is_refused(case, error, words):
    with pytest.raises(error, match=words):
        run(case)
