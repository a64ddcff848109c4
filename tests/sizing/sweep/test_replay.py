"""Replays of a sweep: what a replica gets, a file of results that goes on where it was, several processes."""

import json
from dataclasses import replace

import numpy as np
import pytest

import cpkit.sizing.sweep.run
from cpkit.errors import InputError
from cpkit.settings import StepSettings
from cpkit.simulate.loop import simulate
from cpkit.simulate.result import ReplaySettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.clock import PlannedClock
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.sweep.replay import replay, share_of
from cpkit.sizing.sweep.results import Results
from cpkit.sizing.sweep.run import run_sweep
from cpkit.sizing.sweep.screen import average_request, gpu_seconds
from cpkit.workload.request import Request, Trace
from tests.sizing.sweep.small import TRACE, make_allowed, make_setting, outcome


def test_a_share_keeps_sessions_whole():
    turns = [("a", None), ("b", None), ("a", 0), (None, None), ("c", None), ("b", 1), ("a", 2)]
    requests = [Request(i, 0.0, 10 + i, 1, session=s, depends_on=d) for i, (s, d) in enumerate(turns)]
    kept = share_of(Trace("made", "plain", tuple(requests)), 2).requests  # dealt in turn: a, b, request 3, c
    assert [(r.req_id, r.prompt_len, r.session, r.depends_on) for r in kept] == [
        (0, 10, "a", None),
        (1, 12, "a", 0),
        (2, 13, None, None),
        (3, 16, "a", 1),
    ]


def sweep(path, some, setting, **options):
    with Results(path, TRACE, setting) as results:
        return run_sweep(some, TRACE, setting, results, processes=1, **options)


def outcomes_in(path, trace=TRACE, **changes):
    with Results(path, trace, make_setting(**changes)) as results:
        return results.outcomes


def test_a_sweep_goes_on_where_it_was(tmp_path, monkeypatch):
    path, setting = tmp_path / "results.jsonl", make_setting()
    some = make_allowed()[0][:3]
    first, failed = sweep(path, some[:2], setting)
    assert len(first) == 2 and not failed and all(one.finished == 24 and one.refused == 0 for one in first)
    with path.open("a") as file:
        file.write('{"cut": ')  # as an interrupt leaves it

    replayed = []
    whole = cpkit.sizing.sweep.run.replay

    def watched(trace, setting, candidate, num_blocks):
        replayed.append(candidate)
        return whole(trace, setting, candidate, num_blocks)

    monkeypatch.setattr(cpkit.sizing.sweep.run, "replay", watched)
    again, _ = sweep(path, some, setting)
    assert replayed == [some[2].candidate] and again[:2] == first
    assert [one.candidate for one in again] == [one.candidate for one in some]
    assert outcomes_in(path).keys() == {one.candidate for one in some}
    assert all(json.loads(line) for line in path.read_text().splitlines())


SESSIONS = Trace("made", "plain", tuple(replace(request, session="a") for request in TRACE.requests))
"""Dealt out otherwise, though every length and time is the same."""


@pytest.mark.parametrize(
    ("trace", "changes", "told"),
    [
        pytest.param(TRACE, {"seed": 1}, "the requests themselves, --load, --seed, or a limit", id="seed"),
        pytest.param(SESSIONS, {}, "the requests themselves", id="sessions"),
        pytest.param(
            replace(TRACE, requests=TRACE.requests[:5]), {}, r"\(requests 24, here 5\); name another", id="requests"
        ),
        pytest.param(replace(TRACE, name="b"), {"engine": "vllm"}, "trace made, here b; engine cpkit", id="two-things"),
        pytest.param(TRACE, {"drafts": 2}, r"\(drafts 0, here 2\)", id="drafts"),
        pytest.param(TRACE, {"acceptance_rate": 0.5}, "a limit or assumption differs", id="acceptance-rate"),
        pytest.param(TRACE, {"model": "glm-5.2"}, r"\(model deepseek-v3.2, here glm-5.2\)", id="model"),
    ],
)
def test_results_of_another_sweep_are_refused(tmp_path, trace, changes, told):
    path = tmp_path / "results.jsonl"
    assert outcomes_in(path) == outcomes_in(path) == {}
    before = path.read_bytes()
    with pytest.raises(InputError, match=f"results of another sweep .*{told}"):
        outcomes_in(path, trace, **changes)
    assert path.read_bytes() == before


def test_results_that_another_sweep_writes_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    with Results(path, TRACE, make_setting()) as results:
        results.add(outcome(8, 8, 0.05, 100.0, 10))
        with pytest.raises(InputError, match="another sweep writes it now"):
            outcomes_in(path)
    assert len(outcomes_in(path)) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda header, line: b"no JSON\n", id="no-json"),
        pytest.param(lambda header, line: b"one line without an end", id="no-end"),
        pytest.param(lambda header, line: b"{}\n", id="no-sweep"),
        pytest.param(lambda header, line: b"[]\n", id="no-header"),
        pytest.param(lambda header, line: b"\xff\xfe\n", id="no-text"),
        pytest.param(lambda header, line: header + b"[]\n", id="no-outcome"),
        pytest.param(lambda header, line: header + line.replace(b'"steps": 9', b'"stops": 9'), id="field"),
        pytest.param(lambda header, line: header + line.replace(b'"steps": 9', b'"steps": "9"'), id="no-number"),
        pytest.param(lambda header, line: header + line.replace(b"[0.0, 8.0]", b"[8.0]"), id="no-pair"),
        pytest.param(lambda header, line: header + line.replace(b"head_tail", b"zigzag"), id="partition"),
    ],
)
def test_what_holds_no_results_is_refused(tmp_path, spoil):
    path = tmp_path / "results.jsonl"
    with Results(path, TRACE, make_setting()) as results:
        results.add(outcome(8, 8, 0.05, 100.0, 10))
    header, line = path.read_bytes().splitlines(keepends=True)
    assert b'"steps": 9' in line and b"[0.0, 8.0]" in line, "what is spoilt below"
    assert len(outcomes_in(path)) == 1
    path.write_bytes(spoil(header, line))
    before = path.read_bytes()
    with pytest.raises(InputError, match="not the results of a sweep"):
        outcomes_in(path)
    assert path.read_bytes() == before


def test_processes_change_nothing():
    allowed, _ = make_allowed()
    one, two = (
        run_sweep(allowed[:2], TRACE, make_setting(), Results(None, TRACE, make_setting()), processes=number)[0]
        for number in (1, 2)
    )
    assert [replace(each, wall_s=0.0) for each in one] == [replace(each, wall_s=0.0) for each in two]


def test_vllms_layers_take_longer_than_the_kernels():
    one = next(one for one in make_allowed()[0] if one.candidate.pcp == one.candidate.dcp == 1)
    cpkit_s, vllm_s = (
        replay(TRACE, make_setting(engine=engine), one.candidate, one.memory.num_blocks).tpot_s[0]
        for engine in ("cpkit", "vllm")
    )
    assert vllm_s > 1.1 * cpkit_s
    costs = [gpu_seconds(one, TRACE, make_setting(engine=engine)) for engine in ("cpkit", "vllm")]
    assert costs[1] > costs[0]


def test_kept_drafts_shorten_a_token_and_rejected_ones_lengthen_it():
    one = next(one for one in make_allowed()[0] if one.candidate.pcp == one.candidate.dcp == 1)
    plain, *drafting = (
        replay(TRACE, setting, one.candidate, one.memory.num_blocks)
        for setting in (make_setting(), *[make_setting(drafts=3, acceptance_rate=rate) for rate in (0.0, 0.7, 1.0)])
    )
    none, some, every = (outcome.tpot_s[0] for outcome in drafting)
    assert every < some < none and none > plain.tpot_s[0] and every < 0.5 * none
    assert all(outcome.finished == plain.finished for outcome in drafting)


def test_a_replay_with_drafts_is_the_one_of_simulate():
    """The same drafts are kept, and every step planned takes hardly another time than those read from the grid."""
    one = next(one for one in make_allowed(drafts=2)[0] if (one.candidate.pcp, one.candidate.dcp) == (2, 8))
    setting, memory = make_setting(drafts=2, acceptance_rate=0.6), one.memory
    swept = replay(TRACE, setting, one.candidate, memory.num_blocks)
    settings = StepSettings(memory.settings.topology, setting.model, setting.budget, one.candidate.partition)
    clock = PlannedClock(CostModel(setting.model, setting.weights, settings.topology, chip("h200")), settings)
    limits = {"num_kv_blocks": memory.num_blocks, "max_model_len": setting.max_model_len}
    simulation = simulate(TRACE, settings, ReplaySettings(**limits, acceptance_rate=0.6, check_every=0), clock=clock)
    tpot = simulation.stats.tpot_s
    assert swept.tpot_s == pytest.approx(np.percentile(tpot, [50, 99], method="lower").tolist(), rel=0.06)
    assert swept.finished == simulation.stats.num_finished and swept.steps == pytest.approx(simulation.num_steps, abs=3)


def test_an_average_request_takes_fewer_steps_the_more_drafts_are_kept():
    one = next(one for one in make_allowed(drafts=2)[0] if one.candidate.pcp == one.candidate.dcp == 1)
    settings = (make_setting(drafts=2, acceptance_rate=rate) for rate in (0.0, 1.0))
    (prefills, decodes), (same, fewer) = (
        [number for _, number in average_request(one, TRACE, setting)] for setting in settings
    )
    assert prefills == same and decodes == 3 * fewer
