"""The replay loop: every step planned and checked, the same result in any number of processes, faults reported."""

import dataclasses
import threading
from collections import Counter

import numpy as np
import pytest

import cpkit.simulate.loop
import cpkit.simulate.record
from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.errors import ConfigError, PlanError
from cpkit.model import load_model
from cpkit.promises import Violation
from cpkit.settings import StepSettings
from cpkit.simulate.loop import simulate
from cpkit.simulate.record import record_step
from cpkit.simulate.result import Quantiles, ReplaySettings, quantiles
from cpkit.topology import Topology
from cpkit.views.balance import imbalance
from cpkit.workload.request import Request, Trace
from cpkit.workload.scheduler import Scheduler

MODEL = load_model("deepseek-v3.2")


def make_settings(tp=2, pcp=2, dcp=4, **limits):
    return StepSettings(Topology(tp=tp, pcp=pcp, dcp=dcp), MODEL, default_budget(MODEL, **limits))


def make_trace(lens=((700, 30), (64, 5), (1, 1), (4000, 12), (300, 0))):
    return Trace("made", "plain", tuple(Request(i, 0.04 * i, *pair) for i, pair in enumerate(lens)))


def make_replay(**changes):
    return ReplaySettings(**({"num_kv_blocks": 500, "max_model_len": 10_000} | changes))


def timeless(simulation):
    """The figures that do not depend on the clock of this machine or on how the work was shared out."""
    data = simulation.to_json()
    for name in ("planner_us", "wall_s", "replay"):
        del data[name]
    return data


def test_a_replay_counts_what_the_scheduler_did():
    trace, settings, replay = make_trace(), make_settings(), make_replay()
    simulation = simulate(trace, settings, replay)
    scheduler = Scheduler(trace, settings.topology, settings.budget, num_kv_blocks=500, max_model_len=10_000)
    batches = [step.batch for step in scheduler]

    assert simulation.complete and simulation.num_ranks == 4
    assert simulation.num_steps == simulation.num_checked == len(batches)
    assert simulation.num_tokens == sum(int(batch.query_lens.sum()) for batch in batches)
    decodes = [batch.query_lens[batch.seq_lens - batch.query_lens >= batch.prompt_lens].sum() for batch in batches]
    assert simulation.num_decode_tokens == sum(decodes)
    assert simulation.stats.num_finished == 5 and simulation.num_violations == 0
    assert simulation.peaks.kv_blocks == max(step.num_held_blocks for step in _steps(trace, settings))


def _steps(trace, settings):
    return Scheduler(trace, settings.topology, settings.budget, num_kv_blocks=500, max_model_len=10_000)


def test_figures_against_plans_made_one_by_one():
    """Balance, traffic and peaks, counted token by token from the plans of every step."""
    trace, settings = make_trace(), make_settings(logits_bytes=40_000)
    simulation = simulate(trace, settings, make_replay())
    calls, sizes, token_ratios, work_ratios, key_ratios = Counter(), Counter(), [], [], []
    workspace = logits = 0
    for step in _steps(trace, settings):
        plans = [settings.plan(step.batch, rank) for rank in range(4)]
        tokens, work, keys = [], [], []
        for plan in plans:
            rank = plan.ranks[0]
            positions = rank.rows.positions().tolist()
            tokens.append(len(positions))
            work.append(sum(pos + 1 for pos in positions))
            keys.append(sum(pos % 4 == rank.dcp_rank for n in step.batch.seq_lens.tolist() for pos in range(n)))
            for chunk in rank.chunks[1]:
                workspace = max(workspace, chunk.num_keys)
                logits = max([logits, *(4 * (stop - start) * chunk.num_keys for start, stop in chunk.runs())])
        for ratios, amounts in ((token_ratios, tokens), (work_ratios, work), (key_ratios, keys)):
            ratios.append(max(amounts) / (sum(amounts) / 4))
        for layer, collectives in zip(MODEL.layers, plans[0].collectives.layers, strict=True):
            for collective in collectives:
                calls[collective.op, collective.group] += layer.num_layers * collective.times
                sizes[collective.op, collective.group] += layer.num_layers * collective.bytes
        for collective in plans[0].collectives.step:
            calls[collective.op, collective.group] += 1
            sizes[collective.op, collective.group] += collective.bytes
    traffic = simulation.traffic
    assert {kind: (total.calls, total.bytes) for kind, total in traffic.items()} == {
        k: (calls[k], sizes[k]) for k in calls
    }
    assert (simulation.peaks.workspace_tokens, simulation.peaks.logits_bytes) == (workspace, logits)
    assert logits > 0
    for name, ratios in (("tokens", token_ratios), ("causal_work", work_ratios), ("stored_keys", key_ratios)):
        middle = sorted(ratios)[(len(ratios) - 1) // 2]
        assert simulation.balance[name].p50 == pytest.approx(middle)
        assert middle <= simulation.balance[name].p99 <= max(ratios) + 1e-12


def test_any_number_of_processes_gives_the_same(monkeypatch):
    monkeypatch.setattr(cpkit.simulate.loop, "LOT_PLANS", 20)
    trace, settings = make_trace(), make_settings(num_speculative_tokens=2)
    alone = simulate(trace, settings, make_replay(seed=3))
    shared = simulate(trace, settings, make_replay(seed=3, processes=2))
    assert timeless(alone) == timeless(shared) and alone.num_steps > 10
    other_seed = simulate(trace, settings, make_replay(seed=4))
    assert timeless(other_seed) != timeless(alone)


@pytest.mark.parametrize("max_steps", [1, 7, None])
@pytest.mark.parametrize("check_every", [0, 1, 3])
def test_steps_and_checks(monkeypatch, max_steps, check_every):
    checked = []
    monkeypatch.setattr(cpkit.simulate.record, "check_step", lambda plans: checked.append(len(plans)) or ())
    replay = make_replay(max_steps=max_steps, check_every=check_every)
    simulation = simulate(make_trace(), make_settings(), replay)
    steps = simulation.num_steps if max_steps is None else max_steps
    assert simulation.num_steps == steps and simulation.complete
    assert checked == [4] * (0 if check_every == 0 else len(range(0, steps, check_every)))
    assert simulation.num_checked == len(checked)


def test_every_rank_is_planned_on_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(
        StepSettings,
        "plan",
        lambda self, batch, rank=None, plan=StepSettings.plan: asked.append(rank) or plan(self, batch, rank),
    )
    simulation = simulate(make_trace(), make_settings(), make_replay())
    assert asked == [0, 1, 2, 3] * simulation.num_steps


def drop_a_token(plan):
    """The plan with one query token less in its rank's last row."""
    rank = plan.ranks[0]
    num_tokens = rank.rows.num_tokens.copy()
    num_tokens[-1] -= 1
    rows = dataclasses.replace(rank.rows, num_tokens=num_tokens)
    return dataclasses.replace(plan, ranks=(dataclasses.replace(rank, rows=rows),))


def test_a_planted_fault_is_counted_and_kept(monkeypatch):
    """Rank 3 loses a token of every prefill step; the other steps stay clean."""
    whole = StepSettings.plan

    def plan(self, batch, rank=None):
        planned = whole(self, batch, rank)
        return drop_a_token(planned) if rank == 3 and batch.is_prefilling.any() else planned

    monkeypatch.setattr(StepSettings, "plan", plan)
    trace, settings = make_trace(), make_settings()
    simulation = simulate(trace, settings, make_replay())
    faulty = [step for step in _steps(trace, settings) if step.batch.is_prefilling.any()]
    assert simulation.num_broken == len(faulty) and simulation.num_violations >= len(faulty)
    assert simulation.broken[0].index == faulty[0].index
    assert simulation.broken[0].batch.to_json() == faulty[0].batch.to_json()
    assert any(3 in violation.ranks for violation in simulation.broken[0].violations)
    assert simulation.to_json()["violations"] == simulation.num_violations


def test_only_the_first_broken_steps_are_kept(monkeypatch):
    fault = Violation("agree", "padded", (1,), "padded is 3, on most ranks 4")
    monkeypatch.setattr(cpkit.simulate.record, "check_step", lambda plans: (fault, fault))
    simulation = simulate(make_trace(), make_settings(), make_replay())
    assert simulation.num_broken == simulation.num_steps and simulation.num_violations == 2 * simulation.num_steps
    assert len(simulation.broken) == 10


def test_an_interrupt_leaves_what_there_is(monkeypatch):
    monkeypatch.setattr(cpkit.simulate.loop, "LOT_PLANS", 8)

    def stop(progress):
        if progress.num_steps == 6:
            raise KeyboardInterrupt

    simulation = simulate(make_trace(), make_settings(), make_replay(), on_progress=stop)
    assert simulation.num_steps == 6 and not simulation.complete
    assert simulation.num_tokens == simulation.stats.num_tokens and simulation.stats.num_steps == 6


def test_progress_rises_to_one():
    seen = []
    simulate(make_trace(), make_settings(tp=8, pcp=2, dcp=16), make_replay(), on_progress=seen.append)
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert seen[-1].num_done == seen[-1].num_requests == 5


def test_processes_work_outside_the_main_thread(monkeypatch):
    """Where signal handlers cannot be set."""
    monkeypatch.setattr(cpkit.simulate.loop, "LOT_PLANS", 20)
    out = []
    thread = threading.Thread(
        target=lambda: out.append(simulate(make_trace(), make_settings(), make_replay(processes=2, max_steps=12)))
    )
    thread.start()
    thread.join()
    assert out[0].num_steps == 12


def test_refused_requests_are_counted_and_the_replay_goes_on():
    trace = make_trace(((700, 3), (9_999, 2), (0, 4), (100, 2)))
    simulation = simulate(trace, make_settings(), make_replay())
    assert simulation.stats.num_finished == 2 and simulation.to_json()["refused"] == 2
    assert sum(simulation.to_json()["refused_reasons"].values()) == 2


def test_a_trace_of_refused_requests_alone():
    simulation = simulate(make_trace(((99_999, 2),)), make_settings(), make_replay())
    data = simulation.to_json()
    assert (data["steps"], data["tokens"], data["refused"], data["prefix_hit_rate"]) == (0, 0, 1, 0.0)
    assert data["balance"]["tokens"] == {"p50": 0.0, "p99": 0.0}


def test_a_world_that_cannot_merge_is_refused_only_when_something_is_merged():
    """glm-5 has 64 heads: dcp=128 cannot share them out, which only decodes need under PCP."""
    model = load_model("glm-5")
    settings = StepSettings(Topology(tp=8, pcp=16, dcp=128), model, default_budget(model))
    with pytest.raises(ConfigError, match="64 heads cannot be scattered over dcp=128"):
        simulate(make_trace(), settings, make_replay())
    prefills = make_trace(((700, 1), (50, 0)))
    assert simulate(prefills, settings, make_replay()).num_violations == 0


def test_a_step_that_fits_no_budget_is_named():
    settings = make_settings(workspace_tokens=3)
    with pytest.raises(PlanError, match=r"step 0 \(\d+ requests?, \d+ query tokens\): no key span fits"):
        simulate(make_trace(), settings, make_replay())
    with pytest.raises(PlanError, match=r"step 5 .*no key span fits"):
        record_step(settings, 5, Batch.from_lens([700], [700]), check=True)


@pytest.mark.parametrize(
    ("amounts", "ratio"),
    [([2, 2, 4], 1.5), ([1, 1, 1], 1.0), ([0, 0], 1.0), ([0, 8], 2.0), ([1 << 62, 0], 2.0)],
)
def test_imbalance(amounts, ratio):
    assert imbalance(np.array(amounts)) == ratio


def test_quantiles_are_values_that_occurred():
    assert quantiles([]) == Quantiles(0.0, 0.0)
    assert quantiles([7.0]) == Quantiles(7.0, 7.0)
    assert quantiles([float(i) for i in range(1, 101)]) == Quantiles(50.0, 99.0)
