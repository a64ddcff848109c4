"""`cpkit sweep` as a shell sees it: report, JSON, refusals on one line, interrupts."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from cpkit.cli.main import main
from cpkit.cli.sweep import gpu_counts


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
    assert data["take"] in [one["candidate"] for one in data["best"]] and data["keeps_aim"]
    assert len(data["best"]) + len(data["losers"]) == 12 and len(data["refused"]) == 13
    assert all(one["reason"] and one["beaten_by"] for one in data["losers"])
    (taken,) = [one for one in data["best"] if one["candidate"] == data["take"]]
    replicas = 8 // (data["take"]["tp"] * data["take"]["pcp"])
    assert data["memory"]["weights"]["value"] > 79e9 and replicas * data["memory"]["tokens"] == taken["capacity"]

    assert main(["sweep", str(trace_file), *flags, "--limit", "2", "--gpus", "8,16"]) == 0
    text = capsys.readouterr().out
    assert "2 deployments replayed" in text and "Take " in text and "not replayed (--limit 2)" in text


def test_drafts_are_told_and_written(trace_file, capsys):
    flags = ["--max-model-len", "8192", "--batch-tokens", "8192", "--processes", "1", "--limit", "1"]
    drafts = ["--num-speculative-tokens", "2", "--acceptance-rate", "0.5"]
    assert main(["sweep", str(trace_file), *flags, *drafts]) == 0
    text = capsys.readouterr().out
    assert (
        "Drafts    2 tokens a decode, each kept with a chance of 0.5 after those before it: 1.75 tokens a step" in text
    )
    assert "--num-speculative-tokens 2" in text
    found = []
    for more in ([], drafts):
        assert main(["sweep", str(trace_file), *flags, *more, "--json", "-"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [(data["num_speculative_tokens"], data["acceptance_rate"]) for data in found] == [(0, 0.7), (2, 0.5)]
    assert found[1]["best"][0]["capacity"] < found[0]["best"][0]["capacity"], "the draft module's keys take room"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        pytest.param(["--gpus", "4"], "no deployment was replayed", id="no-room"),
        pytest.param(["--max-model-len", "100", "--limit", "1"], "no deployment serves a request", id="all-refused"),
    ],
)
def test_nothing_to_take_is_a_no(trace_file, tmp_path, capsys, flags, told):
    path = tmp_path / "sweep.json"
    assert main(["sweep", str(trace_file), *flags, "--processes", "1", "--json", str(path)]) == 1
    out, err = capsys.readouterr()
    data = json.loads(path.read_text())
    assert told in out and not err and data["take"] is None and not data["keeps_aim"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "no number of GPUs"),
        (["--chip", "h900"], "unknown chip"),
        (["--weight-bits", "5"], "16, 8 or 4"),
        (["--partitions", "zigzag"], "zigzag"),
        (["--requests", "0"], "at least 1"),
        (["--limit", "0"], "--limit 0: at least 1"),
        (["--seed", "-1"], "--seed -1: it is not negative"),
        (["--batch-tokens", "0"], "batch tokens 0: at least 1"),
        (["--processes", "0"], "1 to 256"),
        (["--num-speculative-tokens", "-1"], "num_speculative_tokens=-1: it is a whole number from 0"),
        (["--acceptance-rate", "1.5"], "'1.5' is no chance: a number from 0 to 1"),
        (["--acceptance-rate", "some"], "'some' is no chance"),
        (["--batch-tokens", ""], "no batch tokens to try"),
        (["--results", "out", "--json", "out"], "out: --results and --json would both write it"),
        (["--results", "-"], "--results -: only --json can be printed"),
        (["--results", "/proc/out"], "/proc/out: "),
        (["--results", "/dev/full"], "/dev/full: results are kept in a plain file"),
    ],
)
def test_bad_usage_is_refused_on_one_line(trace_file, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", str(trace_file), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [trace_file]


def test_two_sweeps_on_one_file(trace_file, tmp_path, capsys):
    flags = ["--max-model-len", "8192", "--batch-tokens", "8192", "--processes", "1", "--limit", "1"]
    path = tmp_path / "results.jsonl"
    assert main(["sweep", str(trace_file), *flags, "--results", str(path)]) == 0
    capsys.readouterr()
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["sweep", str(trace_file), *flags, "--results", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "another sweep writes it now" in err
    assert main(["sweep", str(trace_file), *flags, "--results", str(path), "--model", "glm-5.2"]) == 2
    assert "(model deepseek-v3.2, here glm-5.2); name another file" in capsys.readouterr().err


def test_names_as_people_serve_them(trace_file, capsys):
    flags = ["--max-model-len", "8192", "--batch-tokens", "8192", "--processes", "1", "--limit", "1", "--json", "-"]
    found = []
    for name in ("deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2-Exp", "org/DeepSeek-V3.2-NVFP4"):
        assert main(["sweep", str(trace_file), *flags, "--model", name]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [data["model"] for data in found] == ["deepseek-v3.2"] * 3
    capacity = [data["best"][0]["capacity"] for data in found]
    assert capacity[0] == capacity[1] < capacity[2], "weights of 4 bits leave more room"


def test_an_interrupt_keeps_what_was_replayed(trace_file, tmp_path):
    path = tmp_path / "results.jsonl"
    rows = [f"{0.1 * i:.1f},{20_000 + i},{40 + i % 7}" for i in range(100)]
    trace_file.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    command = [sys.executable, "-m", "cpkit", "sweep", str(trace_file), "--processes", "2", "--results", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    for _ in range(6000):
        if path.exists() and path.read_text().count("\n") >= 2:
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to every process of the command
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and not out and b"Traceback" not in err
    assert b"interrupted; " in err and b"kept in " in err
    lines = path.read_text().splitlines()
    assert len(lines) >= 2 and all(json.loads(line) for line in lines)
