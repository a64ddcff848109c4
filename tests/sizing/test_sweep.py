"""Sweeps: which deployments are tried, replays that go on where they were, and what beats what."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import cpkit.sizing.sweep.run
from cpkit.budget import default_budget
from cpkit.cli.main import main
from cpkit.cli.sweep import gpu_counts
from cpkit.errors import ConfigError, InputError
from cpkit.model import load_config, load_model, published_fields
from cpkit.sizing.chips import chip
from cpkit.sizing.memory.deployment import Limits
from cpkit.sizing.sweep.candidates import Candidate, Choices, candidates, sort_out
from cpkit.sizing.sweep.choice import Aim, choose
from cpkit.sizing.sweep.replay import Outcome, SweepSetting, share_of
from cpkit.sizing.sweep.run import Results, run_sweep, screen
from cpkit.sizing.weights import load_weights
from cpkit.workload.request import Request, Trace

NAME = "deepseek-v3.2"
MODEL = load_model(NAME)
TRACE = Trace("made", "plain", tuple(Request(i, 0.2 * i, 900 + 700 * (i % 5), 1 + 3 * (i % 4)) for i in range(24)))


def make_setting(**changes):
    return SweepSetting(MODEL, load_weights(NAME, MODEL), "h200", default_budget(MODEL), 20_000, **changes)


def make_allowed(gpus=(8,), engine="cpkit", **choices):
    return sort_out(
        MODEL, chip("h200"), engine, Limits(published_fields(*load_config(NAME)), 20_000), Choices(gpus, **choices)
    )


def outcome(gpus, ttft, tpot, tokens, capacity, **changes):
    candidate = Candidate(gpus, 8, 1, 1, 64, 64, "head_tail", ttft)  # the budget only tells them apart
    plain = {"kv_peak": 0.5, "busy": 0.5, "prefix_hit_rate": 0.0, "steps": 9, "wall_s": 1.0}
    plain |= {"finished": 9, "refused": 0, "preemptions": 0}
    return Outcome(
        candidate, (0.0, float(ttft)), (0.0, tpot), (0.0, 0.0), tokens, capacity, **{**plain, **changes}
    )  # fmt: skip


# ---- what is tried -------------------------------------------------------------------------------------------------


def test_candidates_are_every_legal_world_once():
    found = [(c.tp, c.pcp, c.dcp) for c in candidates(MODEL, Choices((8,)), 64)]
    expected = {
        (tp, pcp, dcp)
        for tp in (1, 2, 4, 8)
        for pcp in (1, 2, 4, 8)
        if tp * pcp <= 8
        for dcp in ([d for d in (1, 2, 4, 8) if tp % d == 0] if pcp == 1 else {1, pcp, tp * pcp})
    }
    assert len(found) == len(set(found)) and set(found) == expected
    doubled = list(candidates(MODEL, Choices((8,), (2048, 8192), ("head_tail", "round_robin"), (1, 0)), 64))
    names = [c.name for c in doubled]
    assert (
        len(set(names))
        == len(names)
        == sum(2 * (2 if pcp > 1 else 1) * (2 if dcp > 1 else 1) for _, pcp, dcp in expected)
    )


def test_the_others_are_refused_with_the_reason():
    allowed, refused = make_allowed()
    assert len(allowed) + len(refused) == len(list(candidates(MODEL, Choices((8,)), 64)))
    assert all(one.candidate.tp * one.candidate.pcp == 8 for one in allowed), "half of 8 H200 does not hold the weights"
    assert all("no room for KV on h200" in one.reason for one in refused)
    _, by_vllm = make_allowed(engine="vllm")
    assert any(one.reason.startswith("vllm-flashmla-padding") and one.candidate.dcp == 8 for one in by_vllm)


def test_unknown_partitions_are_refused():
    with pytest.raises(ConfigError, match="zigzag"):
        Choices((8,), partitions=("zigzag",))


def test_screening_keeps_some_of_each_number_of_gpus():
    allowed, _ = make_allowed((8, 16))
    kept, left = screen(allowed, TRACE, make_setting(), 6)
    assert sorted(one.candidate.gpus for one in kept) == [8, 8, 8, 16, 16, 16]
    assert len(kept) + len(left) == len(allowed) and all("GPU-seconds" in one.reason for one in left)
    assert screen(allowed, TRACE, make_setting(), None) == (allowed, [])


# ---- replays -------------------------------------------------------------------------------------------------------


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


def test_a_sweep_goes_on_where_it_was(tmp_path, monkeypatch):
    path, setting = tmp_path / "results.jsonl", make_setting()
    allowed, _ = make_allowed()
    some = allowed[:3]
    first, failed = run_sweep(some[:2], TRACE, setting, Results(path, TRACE, setting), processes=1)
    assert len(first) == 2 and not failed and all(one.finished == 24 and one.refused == 0 for one in first)
    with path.open("a") as file:
        file.write('{"cut": ')  # as an interrupt leaves it

    replayed = []
    whole = cpkit.sizing.sweep.run.replay

    def watched(trace, setting, candidate, num_blocks):
        replayed.append(candidate)
        return whole(trace, setting, candidate, num_blocks)

    monkeypatch.setattr(cpkit.sizing.sweep.run, "replay", watched)
    again, _ = run_sweep(some, TRACE, setting, Results(path, TRACE, setting), processes=1)
    assert replayed == [some[2].candidate] and again[:2] == first
    assert [one.candidate for one in again] == [one.candidate for one in some]
    assert set(Results(path, TRACE, setting).outcomes) == {one.candidate for one in some}


def test_results_of_another_sweep_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    Results(path, TRACE, make_setting())
    with pytest.raises(InputError, match="another sweep"):
        Results(path, TRACE, make_setting(seed=1))
    with pytest.raises(InputError, match="another sweep"):
        Results(path, replace(TRACE, requests=TRACE.requests[:5]), make_setting())


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda header, line: b"no JSON\n", id="no-json"),
        pytest.param(lambda header, line: b"\xff\xfe\n", id="no-text"),
        pytest.param(lambda header, line: header + b"[]\n", id="no-outcome"),
        pytest.param(lambda header, line: header + line.replace(b'"steps": 9', b'"stops": 9'), id="field"),
        pytest.param(lambda header, line: header + line.replace(b'"steps": 9', b'"steps": "9"'), id="no-number"),
        pytest.param(lambda header, line: header + line.replace(b"[0.0, 8.0]", b"[8.0]"), id="no-pair"),
    ],
)
def test_what_holds_no_results_is_refused(tmp_path, spoil):
    path = tmp_path / "results.jsonl"
    Results(path, TRACE, make_setting()).add(outcome(8, 8, 0.05, 100.0, 10))
    header, line = path.read_bytes().splitlines(keepends=True)
    assert b'"steps": 9' in line and b"[0.0, 8.0]" in line, "what is spoilt below"
    assert len(Results(path, TRACE, make_setting()).outcomes) == 1
    path.write_bytes(spoil(header, line))
    with pytest.raises(InputError, match="not the results of a sweep"):
        Results(path, TRACE, make_setting())


def test_processes_change_nothing():
    allowed, _ = make_allowed()
    one, two = (
        run_sweep(allowed[:2], TRACE, make_setting(), Results(None, TRACE, make_setting()), processes=number)[0]
        for number in (1, 2)
    )
    assert [replace(each, wall_s=0.0) for each in one] == [replace(each, wall_s=0.0) for each in two]


# ---- what they say -------------------------------------------------------------------------------------------------


def test_what_nothing_beats_is_kept_and_the_others_are_told_why():
    fast, roomy = outcome(8, 1, 0.05, 100.0, 10), outcome(8, 5, 0.05, 100.0, 99)
    slow, equal = outcome(8, 9, 0.09, 100.0, 10), outcome(16, 1, 0.0501, 50.0, 10)
    choice = choose([slow, fast, roomy, equal], Aim())
    assert choice.best == (fast, roomy)
    assert [(loser.outcome, loser.by) for loser in choice.losers] == [(slow, fast), (equal, fast)]
    assert choice.losers[0].reason == "first token p99 1.0 s against 9.0 s, a token p99 50 ms against 90 ms"
    assert "tokens/s a GPU 100 against 50" in choice.losers[1].reason


def test_the_one_to_take_keeps_the_aim_with_the_most_tokens_a_gpu():
    cheap, quick = outcome(8, 8, 0.05, 100.0, 10), outcome(16, 1, 0.05, 50.0, 10)
    assert choose([cheap, quick], Aim(10, 0.1)).take is cheap
    assert choose([cheap, quick], Aim(2, 0.1)).take is quick
    nothing = choose([cheap, quick], Aim(0.5, 0.1))
    assert nothing.take is quick and "nothing replayed keeps" in nothing.why[0]
    assert choose([], Aim()).take is None


def test_a_full_pool_has_no_room_to_spare():
    full, roomy = outcome(8, 1, 0.05, 200.0, 10, kv_peak=0.99), outcome(8, 5, 0.05, 100.0, 99)
    assert choose([full, roomy], Aim()).take is roomy
    assert choose([full], Aim()).take is full


def test_requests_that_only_some_deployments_refuse_count_against_them():
    small, large = outcome(8, 1, 0.05, 200.0, 10, refused=3, finished=6), outcome(8, 5, 0.05, 100.0, 99)
    assert choose([small, large], Aim()).take is large
    alike = [replace(small, refused=3), replace(large, refused=3, finished=6)]
    assert choose(alike, Aim()).take is alike[0], "what every deployment refuses is the trace's"


def test_the_reasons_name_what_a_replay_showed():
    plain = outcome(8, 20, 0.05, 100.0, 10, kv_peak=1.0, preemptions=7)
    split = outcome(8, 1, 0.05, 100.0, 99)
    split = replace(split, candidate=replace(split.candidate, dcp=8))
    why = " ".join(choose([plain, split], Aim()).why)
    assert "without context parallelism" in why and "KV pool was full (7 preemptions)" in why
    assert "with whole keys on every rank (dcp 1)" in why
    assert "buy room that this trace does not fill" in " ".join(choose([outcome(8, 1, 0.05, 100.0, 99)], Aim()).why)


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts"), [("8", (8,)), ("8,24", (8, 24)), ("8..64", (8, 16, 32, 64)), ("6..25", (6, 12, 24))]
)
def test_numbers_of_gpus(text, counts):
    assert gpu_counts(text) == counts


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.csv"
    lines = [f"{0.2 * i:.2f},{900 + 700 * (i % 5)},{1 + 3 * (i % 4)}" for i in range(20)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines]) + "\n")
    return path


def test_the_command_reports_and_writes_json(trace_file, capsys):
    flags = ["--max-model-len", "8192", "--batch-tokens", "8192", "--processes", "1"]
    assert main(["sweep", str(trace_file), *flags, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["take"] in [one["candidate"] for one in data["best"]]
    assert len(data["best"]) + len(data["losers"]) == 12 and len(data["refused"]) == 13
    assert all(one["reason"] and one["beaten_by"] for one in data["losers"])

    assert main(["sweep", str(trace_file), *flags, "--limit", "2", "--gpus", "8,16"]) == 0
    text = capsys.readouterr().out
    assert "2 deployments replayed" in text and "Take " in text and "not replayed (--limit 2)" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "no number of GPUs"),
        (["--chip", "h900"], "unknown chip"),
        (["--weight-bits", "5"], "16, 8 or 4"),
        (["--partitions", "zigzag"], "zigzag"),
        (["--requests", "0"], "at least 1"),
        (["--limit", "0"], "--limit 0: at least 1"),
        (["--processes", "0"], "1 to 256"),
        (["--batch-tokens", ""], "no batch tokens to try"),
        (["--results", "out", "--json", "out"], "out: --results and --json would both write it"),
    ],
)
def test_bad_usage_is_refused_on_one_line(trace_file, capsys, flags, message):
    assert main(["sweep", str(trace_file), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_interrupt_keeps_what_was_replayed(trace_file, tmp_path):
    path = tmp_path / "results.jsonl"
    rows = [f"{0.1 * i:.1f},{20_000 + i},{40 + i % 7}" for i in range(100)]
    trace_file.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    command = [sys.executable, "-m", "cpkit", "sweep", str(trace_file), "--processes", "2", "--results", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    for _ in range(1200):
        if path.exists() and path.read_text().count("\n") >= 2:
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to every process of the command
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and not out and b"Traceback" not in err
    assert b"interrupted; " in err and b"kept in " in err
    lines = path.read_text().splitlines()
    assert len(lines) >= 2 and all(json.loads(line) for line in lines)
