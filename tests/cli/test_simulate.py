"""`cpkit simulate`: its report, its JSON, its exit codes, and what it leaves behind when a promise is broken."""

import gzip
import json
import re
import shlex

import pytest

import cpkit.simulate.record
from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.cli.main import main, make_parser
from cpkit.cli.options import engine_flags, read_settings
from cpkit.cli.pool import default_pool
from cpkit.cli.progress import ProgressLine, progress_text
from cpkit.errors import ConfigError
from cpkit.model import load_model
from cpkit.promises import Violation
from cpkit.settings import StepSettings
from cpkit.simulate.loop import Progress
from cpkit.sizing.figures import Figure
from cpkit.topology import Topology

WORLD = ["-tp", "2", "-pcp", "2", "-dcp", "4", "--processes", "1"]
JSON_KEYS = {
    "requests", "refused", "steps", "tokens", "ranks", "violations", "balance", "collectives", "peaks",
    "prefix_hit_rate", "preemptions", "planner_us",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    """Five requests; the fourth is longer than 2,000 tokens."""
    path = tmp_path / "trace.csv"
    lens = [(700, 30), (64, 5), (1, 1), (4000, 12), (300, 0)]
    lines = [f"{0.04 * i},{prompt},{output}" for i, (prompt, output) in enumerate(lens)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines]) + "\n")
    return str(path)


def simulate(capsys, *argv):
    code = main(["simulate", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def figures(capsys, *argv):
    code, out, err = simulate(capsys, *argv, "--json", "-")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_report(capsys, trace):
    code, out, err = simulate(capsys, trace, *WORLD)
    assert (code, err) == (0, "")
    assert "deepseek-v3.2, tp=2 pcp=2 dcp=4: 4 ranks" in out
    assert "5: 5 finished, 0 refused" in out
    assert re.search(r"0 violations; (\d+) of \1 steps checked on all 4 ranks", out)
    for part in ("prefix hits", "preemptions", "query tokens", "causal work", "keys stored", "all_gather over pcp"):
        assert part in out
    for part in ("KV blocks held", "workspace tokens", "indexer logits", "one rank", "p99"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 125


def test_one_is_not_spelled_as_many(capsys, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,1\n")
    flags = ["--num-kv-blocks", "9", "--num-speculative-tokens", "1", "--max-num-seqs", "1"]
    assert main(["simulate", str(trace), *flags]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 step checked on the one rank" in out and "1 draft token," in out and "1 request a step" in out
    assert not re.search(r"\b1 (steps|ranks|tokens|requests)\b", out)


def test_the_json(capsys, trace, tmp_path):
    data = figures(capsys, trace, *WORLD)
    assert data.keys() >= JSON_KEYS
    assert (data["requests"], data["refused"], data["ranks"], data["violations"]) == (5, 0, 4, 0)
    # prompts, and every output token but the first, which the prefill gives, and the last, which nobody reads
    assert data["tokens"] == 700 + 64 + 1 + 4000 + 300 + 29 + 4 + 0 + 11 + 0
    assert data["balance"].keys() == {"tokens", "causal_work", "stored_keys"}
    assert all(row.keys() == {"op", "group", "calls", "bytes"} for row in data["collectives"])
    assert data["peaks"].keys() == {"kv_blocks", "workspace_tokens", "logits_bytes"}
    assert 0 < data["planner_us"]["p50"] <= data["planner_us"]["p99"]

    path = tmp_path / "report.json"
    code, out, _ = simulate(capsys, trace, *WORLD, "--json", str(path))
    assert code == 0 and out.startswith("Trace ")
    assert json.loads(path.read_text())["tokens"] == data["tokens"]


def test_refused_requests_and_strict(capsys, trace):
    code, out, err = simulate(capsys, trace, *WORLD, "--max-model-len", "2000")
    assert (code, err) == (0, "") and "4 finished, 1 refused" in out
    assert "1 refused: prompt and output exceed max_model_len=2000" in out
    code, out, err = simulate(capsys, trace, *WORLD, "--max-model-len", "2000", "--strict")
    assert code == 2 and "1 refused" in out
    assert err == (
        "cpkit simulate: error: --strict, and 1 request was refused (1: prompt and output exceed max_model_len=2000)\n"
    )
    assert simulate(capsys, trace, *WORLD, "--strict")[0] == 0


def test_steps_check_and_seed(capsys, trace):
    data = figures(capsys, trace, *WORLD, "--steps", "7", "--check", "every:3", "--seed", "5")
    assert (data["steps"], data["checked_steps"], data["replay"]["seed"]) == (7, 3, 5)
    assert figures(capsys, trace, *WORLD, "--check", "none")["checked_steps"] == 0
    assert "Promises  not checked" in simulate(capsys, trace, *WORLD, "--check", "none")[1]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        pytest.param(["--check", "some"], "'some' is none of all, none, every:K", id="check-word"),
        pytest.param(["--check", "every:0"], "K of at least 1", id="check-every-0"),
        pytest.param(["--steps", "0"], "--steps 0: it is from 1", id="no-steps"),
        pytest.param(["--steps", "9" * 20], "9: it is from 1 to 2^40", id="steps-above-64-bits"),
        pytest.param(["--seed", "-1"], "--seed -1", id="negative-seed"),
        pytest.param(["--processes", "0"], "--processes 0", id="no-process"),
        pytest.param(["--num-kv-blocks", "1"], "num_kv_blocks=1", id="null-block-alone"),
        pytest.param(["--chip", "abacus"], "unknown chip 'abacus': use one of", id="chip"),
        pytest.param(["--gpu-memory-utilization", "90"], "--gpu-memory-utilization 90: a share", id="per-cent"),
        pytest.param(["--weights-gib", "131"], "no room for KV on h200", id="weights-fill-the-chip"),
        pytest.param(["--acceptance-rate", "1.5"], "'1.5' is no chance: a number from 0 to 1", id="acceptance"),
        pytest.param(["--num-kv-blocks", "9", "--chip", "h100"], "leave out --chip and", id="pool-and-chip"),
        pytest.param(["--num-kv-blocks", "9", "--weights-gib", "9"], "leave out --chip and", id="pool-and-weights"),
        pytest.param(["--max-model-len", "0"], "--max-model-len 0", id="no-length"),
        pytest.param(["--cp-kv-cache-interleave-size", "48"], "does not divide block_size=64", id="interleave"),
        pytest.param(["--workspace-tokens", "3"], "no key span fits", id="budget-below-a-span"),
        pytest.param(["--json", "no/such/dir.json"], "no/such/dir.json: there is no folder no/such", id="no-folder"),
        pytest.param(["--json", ""], "the name of an output file is empty", id="json-without-a-name"),
        pytest.param(["--json", "/"], "/: a folder, where", id="json-is-a-folder"),
        pytest.param(["--save-violation", "/"], "/: a folder, where", id="violation-is-a-folder"),
    ],
)
def test_bad_usage(capsys, trace, argv, reason):
    code, _, err = simulate(capsys, trace, *WORLD, *argv)
    assert code == 2 and reason in err
    assert err.count("\n") == 1 and err.startswith("cpkit simulate: error: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "empty trace", id="empty"),
        pytest.param(b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n1,x,5\n", "line 3", id="malformed-line"),
        pytest.param(b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,-5,5\n", "line 2", id="negative"),
        pytest.param(gzip.compress(b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n")[:-4], "gz", id="gz"),
    ],
)
def test_bad_traces_name_file_and_line(capsys, tmp_path, content, reason):
    path = tmp_path / "bad.trace"
    path.write_bytes(content)
    code, out, err = simulate(capsys, str(path), *WORLD)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert str(path) in err and reason in err


def test_skip_bad_counts_malformed_lines(capsys, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\nx,y,z\n1,7,2\n")
    code, out, _ = simulate(capsys, str(path), *WORLD, "--skip-bad")
    assert code == 0 and "1 malformed line skipped" in out
    assert figures(capsys, str(path), *WORLD, "--skip-bad")["trace"]["skipped"] == 1


def test_a_violation_is_reported_saved_and_can_be_looked_at(capsys, trace, tmp_path, monkeypatch):
    """The command that is printed plans the very step that was saved."""
    monkeypatch.chdir(tmp_path)
    fault = Violation("cover", "query_tokens", (1, 3), "token 5 of request 0 is computed by 2 ranks")
    checks = iter([(), (fault,), (fault,)])
    monkeypatch.setattr(cpkit.simulate.record, "check_step", lambda plans: next(checks, ()))
    code, out, err = simulate(capsys, trace, *WORLD, "--partition", "round-robin", "--logits-mb", "0.7")
    assert code == 1
    assert "promised: each query token is computed once" in out
    assert "2 violations" in out and "step 1: cover/query_tokens: ranks 1, 3: token 5" in out
    lines = err.splitlines()
    assert lines[0] == f"violation in step 1: {fault}" and "violation.json" in lines[1]
    command = shlex.split(lines[2])
    assert command[:3] == ["cpkit", "plan", "violation.json"]
    assert main([*command[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["batch"] == Batch.load(tmp_path / "violation.json").to_json()
    assert plan["partition"] == "round_robin" and plan["budget"]["logits_bytes"] == int(0.7 * (1 << 20))


def test_a_violation_that_cannot_be_saved_is_still_one(capsys, trace, monkeypatch):
    fault = Violation("cover", "query_tokens", (1, 3), "token 5 of request 0 is computed by 2 ranks")
    monkeypatch.setattr(cpkit.simulate.record, "check_step", lambda plans: (fault,))
    code, _, err = simulate(capsys, trace, *WORLD, "--steps", "1", "--save-violation", "/dev/full")
    assert code == 1
    lines = err.splitlines()
    assert lines == [f"violation in step 0: {fault}", "step 0 could not be saved as /dev/full: No space left on device"]


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param([], id="defaults"),
        pytest.param(
            ["-tp", "4", "-pcp", "2", "-dcp", "8", "-pp", "2", "-dp", "3", "--dcp-comm-backend", "a2a"], id="dcp"
        ),
        pytest.param(["-pcp", "2", "--no-shard-decode-requests", "--max-model-len", "5000"], id="no-shard"),
        pytest.param(["-pcp", "2", "--shard-decode-requests", "--workspace-tokens", "9999"], id="shard"),
        pytest.param(["--logits-mb", "0.3333333", "--num-speculative-tokens", "2", "--max-num-seqs", "5"], id="limits"),
        pytest.param(["--model", "glm-5", "--partition", "contiguous", "--block-size", "32"], id="model"),
    ],
)
def test_engine_flags_undo_read_settings(argv):
    args = make_parser().parse_args(["simulate", "trace", *argv])
    settings = read_settings(args)
    again = make_parser().parse_args(["plan", *shlex.split(engine_flags(args, settings))])
    assert read_settings(again) == settings


BLOCK = (656 + 132) * 61 * 64
BUFFERS = 2 * 40 * 4096 * 132 + (512 << 20) + 256 * 4096 * 4
"""Bytes of a block and of buffers of V3.2 at tp 8, dcp 1, with requests of at most 4,096 tokens."""


def pool(settings, weights, chip="h200"):
    return default_pool(settings, max_model_len=4096, chip=chip, weights=weights, utilization=0.9)


@pytest.mark.parametrize(("tp", "pp", "block_size", "layers"), [(8, 1, 64, 61), (4, 2, 128, 31), (2, 3, 64, 21)])
def test_default_pool(tp, pp, block_size, layers):
    """V3.2: 656 bytes of latent and 132 of index keys a token in each layer, of which the fullest of pp stages counts.
    Buffers of a rank that sends nothing: two workspaces of 40 requests of 4,096 tokens, their logits, and those of 256
    decodes."""
    model = load_model("deepseek-v3.2")
    settings = StepSettings(
        Topology(tp=tp, pp=pp, block_size=block_size), model, default_budget(model, workspace_tokens=40 * 4096)
    )
    block_bytes = (656 + 132) * layers * block_size
    buffers = 2 * 40 * 4096 * 132 + settings.budget.logits_bytes + 256 * 4096 * 4
    stated = pool(settings, Figure(100e9, "given", "as stated"))
    assert stated.num_blocks == int((141e9 * 0.9 - 100e9 - buffers) // block_bytes)
    assert stated.source.startswith(f"h200, 131.3 GiB x 0.9 less 93.1 GiB of weights and {buffers / 2**20:.1f} MiB of")
    assert stated.source.endswith("a block; weights given: as stated") and not stated.note


@pytest.mark.parametrize(
    ("weights", "assumed"),
    [
        pytest.param(0.0, False, id="nothing"),
        pytest.param(141e9 * 0.9 - BUFFERS - 2 * BLOCK, False, id="a-block-beside-the-null-block"),
        pytest.param(141e9 * 0.9 - BUFFERS - 2 * BLOCK + 1, True, id="a-byte-more"),
        pytest.param(627e9, True, id="one-gpu"),
    ],
)
def test_weights_that_leave_no_room_make_way_for_half_the_chip(weights, assumed):
    """The null block and another fit, or the ranks cannot hold the model, and then the report says what is assumed."""
    model = load_model("deepseek-v3.2")
    settings = StepSettings(Topology(tp=8), model, default_budget(model, workspace_tokens=40 * 4096))
    found = pool(settings, Figure(weights, "assumed", "an estimate"))
    held = 70.5e9 if assumed else weights
    assert found.num_blocks == int((141e9 * 0.9 - held - BUFFERS) // BLOCK)
    assert found.memory.settings.weights.value == held
    if not assumed:
        assert not found.note and found.source.endswith("weights estimated: an estimate")
        return
    assert found.source.endswith("weights assumed: half the chip")
    assert found.note.startswith("8 ranks of h200 cannot hold deepseek-v3.2: ")
    assert found.note.endswith("the pool assumes weights of half the chip, 65.7 GiB")


@pytest.mark.parametrize(
    ("world", "assumed"),
    [pytest.param(WORLD, True, id="4-ranks"), pytest.param(["-tp", "8", "--processes", "1"], False, id="8-ranks")],
)
def test_the_report_tells_which_weights_were_taken(capsys, trace, world, assumed):
    """An estimate where the ranks can hold the model, as `cpkit doctor` has it; else half the chip, told in a note."""
    code, out, _ = simulate(capsys, trace, *world)
    text = " ".join(out.split())
    assert code == 0 and ("weights assumed: half the chip" in text) == assumed
    assert ("weights estimated: 672 G parameters" in text) != assumed
    assert ("ranks of h200 cannot hold deepseek-v3.2: 162.4 GiB of weights" in text) == assumed
    data = figures(capsys, trace, *world)
    assert bool(data["kv_pool_note"]) == assumed and data["memory"]["blocks"] == data["replay"]["num_kv_blocks"]
    if not assumed:
        assert main(["doctor", "--model", "deepseek-v3.2", "--chip", "h200", "-tp", "8", "--json"]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        told = {name: memory[name] for name in data["memory"]}
        assert {**told, "utilization": 0} == {**data["memory"], "utilization": 0}


def test_weights_of_fewer_bits_leave_more_room(capsys, trace):
    flags = [trace, "-tp", "8", "--processes", "1", "--steps", "1"]
    bits = [figures(capsys, *flags, *more)["memory"] for more in ([], ["--weight-bits", "4"])]
    assert bits[1]["weights"]["value"] < 0.7 * bits[0]["weights"]["value"] and bits[1]["blocks"] > bits[0]["blocks"]


def test_a_pool_holds_a_draft_modules_keys():
    """One layer of V3.2 more, and logits of two tokens for each of 256 decodes; tp 8 sends nothing of the plan."""
    model = load_model("deepseek-v3.2")
    budget = default_budget(model, workspace_tokens=40 * 4096, num_speculative_tokens=1)
    settings = StepSettings(Topology(tp=8, block_size=64), model, budget)
    found = pool(settings, Figure(100e9, "given", "as stated"))
    buffers = 2 * 40 * 4096 * 132 + budget.logits_bytes + 2 * 256 * 4096 * 4
    assert found.num_blocks == int((141e9 * 0.9 - 100e9 - buffers) // ((656 + 132) * 62 * 64))
    assert "MiB a block with its draft keys; " in found.source


@pytest.mark.parametrize(
    ("flags", "chip"),
    [
        pytest.param([], "h200", id="nothing-said"),
        pytest.param(["--cost", "b200"], "b200", id="the-clock's"),
        pytest.param(["--cost", "b200", "--chip", "h100"], "h100", id="another"),
    ],
)
def test_the_pool_is_of_the_chip_that_keeps_time(capsys, tmp_path, flags, chip):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,2\n")
    assert main(["simulate", str(trace), *flags, "--weights-gib", "40", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_pool_source"].startswith(f"{chip}, ")


def test_default_pool_refuses_what_does_not_fit():
    settings = StepSettings(Topology(), load_model("glm-5"), default_budget(load_model("glm-5")))
    with pytest.raises(ConfigError, match=r"no room for KV on h100.*--weights-gib, or --num-kv-blocks"):
        pool(settings, Figure(72e9, "given", "as stated"), chip="h100")


def test_progress_is_for_terminals_alone(capsys):
    ProgressLine().show(Progress(5, 1, 10, None, 1.0))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(1200, 1000, 4000, None, 60.0), "step 1,200   1,000/4,000 requests   20 steps/s   3:00 to go"),
        (Progress(50, 0, 4000, 100, 10.0), "step 50   0/4,000 requests   5.0 steps/s   0:10 to go"),
        (Progress(50, 0, 4000, None, 10.0), "step 50   0/4,000 requests   5.0 steps/s"),
    ],
)
def test_progress_text(progress, text):
    assert progress_text(progress) == text
