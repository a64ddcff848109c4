"""The guard of a step on simulated ranks: what it compares, when, and what it says; on processes: tests/run."""

from dataclasses import replace

import pytest
import torch

from cpkit.batch import Batch
from cpkit.comm.simulated import run_ranks
from cpkit.consistency.guard import FIELDS, MESSAGE, StepGuard, steps_between
from cpkit.errors import ConfigError, DesyncError
from cpkit.topology import Topology
from tests.worker.worlds import Case

CASE = Case("dsa", 1, {"tp": 2, "pcp": 2, "dcp": 4}, prompts=(30, 3), decodes=1)
SETTINGS, BATCH = CASE.settings, CASE.steps.batches[0]


def plans(odd=None, settings=SETTINGS, batch=BATCH):
    """A plan for each of four ranks; rank 2's from `odd`, a pair of settings and batch."""
    return [(odd if odd and rank == 2 else (settings, batch)) for rank in range(4)]


def guarded(given, *, mode="every", steps=(0,), topology=SETTINGS.topology):
    """Each rank checks its plan at the steps."""

    def program(comm):
        guard = StepGuard(comm, mode, limit_s=5)
        settings, batch = given[comm.rank]
        for step in steps:
            guard.check(step, settings.plan(batch, comm.rank))
            comm.ledger.expect(None)
        guard.close()

    return run_ranks(topology, program, timeout_s=20)


def test_message_is_small_and_holds_all_that_a_plan_digests():
    assert MESSAGE.size <= 256
    assert set(SETTINGS.plan(BATCH, 0).digests()) == set(FIELDS)


@pytest.mark.parametrize("mode", ["every", "sample:2", "off"])
def test_equal_plans_agree(mode):
    guarded(plans(), mode=mode, steps=range(5))


def test_first_field_is_told_with_place_and_both_values():
    odd = Batch.from_lens([30, 4], [30, 3], BATCH.prompt_lens, block_tables=BATCH.block_tables)
    with pytest.raises(DesyncError) as told:
        guarded(plans((SETTINGS, odd)))
    title, first, *_ = str(told.value).splitlines()
    assert title == "ranks planned step 0 differently"
    assert first == "  seq_lens (replica): rank 2: seq_lens[1] is 4, on most ranks 3"


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        pytest.param(
            replace(SETTINGS, budget=replace(SETTINGS.budget, max_num_seqs=9)),
            "budget (world): rank 2: budget['max_num_seqs'] is 9, on most ranks 8",
            id="budget",
        ),
        pytest.param(
            replace(SETTINGS, merge="a2a"), "merge (world): rank 2: merge is 'a2a', on most ranks 'ag_rs'", id="merge"
        ),
        pytest.param(
            replace(SETTINGS, model=replace(SETTINGS.model, hidden_size=32)),
            "model (world): rank 2: model has digest ",
            id="model-known-by-name-and-digest",
        ),
    ],
)
def test_other_settings_are_told(odd, words):
    with pytest.raises(DesyncError) as told:
        guarded(plans((odd, BATCH)))
    assert words in str(told.value)


def test_many_camps_are_told_without_the_values_of_all():
    settings = [replace(SETTINGS, budget=replace(SETTINGS.budget, max_num_seqs=8 + rank)) for rank in range(16)]
    world = Topology(tp=16)
    given = [(replace(one, topology=world), BATCH) for one in settings]
    with pytest.raises(DesyncError) as told:
        guarded(given, topology=world)
    lines = str(told.value).splitlines()
    assert len(lines) == 16 and "max_num_seqs" in lines[1] and "has digest" in lines[-1]


def test_replicas_work_on_batches_of_their_own():
    world = Topology(dp=2, tp=2, dcp=2)
    settings = replace(SETTINGS, topology=world)
    others = Batch.from_lens([9], [9], block_tables=[[1]])
    guarded([(settings, BATCH)] * 2 + [(settings, others)] * 2, topology=world)
    with pytest.raises(DesyncError, match=r"seq_lens \(replica\): rank 3: "):
        guarded([(settings, BATCH)] * 2 + [(settings, others), (settings, BATCH)], topology=world)


def test_sampled_steps_alone_are_compared():
    odd = (replace(SETTINGS, merge="a2a"), BATCH)
    guarded(plans(odd), mode="sample:3", steps=[1, 2, 4, 5])
    with pytest.raises(DesyncError, match="ranks planned step 6 differently"):
        guarded(plans(odd), mode="sample:3", steps=[1, 2, 4, 5, 6])


def test_off_opens_no_channel():
    def program(comm):
        StepGuard(comm, "off").check(0, SETTINGS.plan(BATCH, comm.rank))
        return comm._channel

    assert run_ranks(SETTINGS.topology, program) == [None] * 4


@pytest.mark.parametrize(
    ("steps_of", "modes", "most", "odd"),
    [
        pytest.param({2: [0, 2]}, {}, "step 1", "step 2", id="ahead"),
        pytest.param({2: [0]}, {}, "step 1", "the end of its steps", id="ended"),
        pytest.param({}, {2: "sample:3"}, "step 0", "step 0, with a guard every 3 steps", id="other-mode"),
    ],
)
def test_ranks_at_different_steps_are_told(steps_of, modes, most, odd):
    def program(comm):
        guard = StepGuard(comm, modes.get(comm.rank, "every"), limit_s=5)
        for step in steps_of.get(comm.rank, [0, 1]):
            guard.check(step, SETTINGS.plan(BATCH, comm.rank))
            comm.ledger.expect(None)
        guard.close()

    with pytest.raises(DesyncError) as told:
        run_ranks(SETTINGS.topology, program, timeout_s=20)
    assert str(told.value) == f"ranks are not at the same step\n  ranks 0, 1, 3: {most}\n  rank 2: {odd}"


def test_exchange_begun_early_is_waited_for_late():
    def program(comm):
        guard = StepGuard(comm, limit_s=5)
        plan = SETTINGS.plan(BATCH, comm.rank)
        for step in range(3):
            guard.start(step, plan)
            guard.wait()
            comm.ledger.expect(None)
        return True

    assert run_ranks(SETTINGS.topology, program) == [True] * 4


def stepping(wrong):
    """A program that guards a step and then does something else than the plan's list of collectives."""

    def program(comm):
        guard = StepGuard(comm, limit_s=5)
        guard.check(0, SETTINGS.plan(BATCH, comm.rank))
        wrong(comm)
        guard.check(1, SETTINGS.plan(BATCH, comm.rank))

    with pytest.raises(DesyncError) as told:
        run_ranks(SETTINGS.topology, program, timeout_s=20)
    return str(told.value)


def test_collective_that_is_not_planned_is_refused_before_it_is_entered():
    """Rank 2 alone goes there, and the others, who wait in the planned one, need not time out."""

    def wrong(comm):
        if comm.rank == 2:
            comm.all_gather(torch.zeros(4), "dcp", what="never")
        comm.barrier("world")

    text = stepping(wrong)
    assert text.startswith("rank 2, step 0: collective 0: the plan has all_gather of ")
    assert "issued was all_gather of never over dcp, 4 float32 at consistency/test_guard.py:" in text


def test_step_left_in_the_middle_is_told_by_the_rank_itself():
    text = stepping(lambda comm: None)
    assert ", step 0: collective 0: the plan has all_gather of " in text and text.endswith("nothing more was issued")


def test_engine_that_sends_by_itself_is_held_to_plans_alone():
    def program(comm):
        guard = StepGuard(comm, limit_s=5, holds_collectives=False)
        for step in range(3):  # nothing that a plan lists goes through the comm
            odd = step == 2 and comm.rank == 1
            guard.check(step, SETTINGS.plan(CASE.steps.batches[1] if odd else BATCH, comm.rank))

    with pytest.raises(DesyncError, match="ranks planned step 2 differently"):
        run_ranks(SETTINGS.topology, program, timeout_s=20)


@pytest.mark.parametrize(("mode", "every"), [("every", 1), ("sample:1", 1), ("sample:10", 10), ("off", 0)])
def test_modes(mode, every):
    assert steps_between(mode) == every


@pytest.mark.parametrize("mode", ["", "sample", "sample:", "sample:0", "sample:-1", "sample:x", "every:2", "OFF"])
def test_other_modes_are_refused(mode):
    with pytest.raises(ConfigError, match="use every, sample:K"):
        steps_between(mode)
