"""Faults injected into a run: each is told with rank and field, on every kind of comm, and none hangs."""

import json
import time

import pytest

from cpkit.cli.main import main
from cpkit.errors import ConfigError, InputError
from cpkit.run.execute import RunOptions
from cpkit.run.inject import changed_plan, check_injection
from cpkit.run.injection import KINDS, PLANNED, Injection
from tests.run.fault_table import COMMS, DATA, LAUNCH, PAGE, drawn, launch, page_with, told
from tests.run.injected import LIMIT_S, simulate
from tests.worker.worlds import Case

WORDS = {
    "stale-seq-len": "seq_lens (replica): rank 2: seq_lens[2] is 9, on most ranks 10",
    "dropped-request": "seq_lens (replica): rank 2: seq_lens is int64 of shape (2,), on most ranks int64 of shape (3,)",
    "extra-request": "seq_lens (replica): rank 2: seq_lens is int64 of shape (4,), on most ranks int64 of shape (3,)",
    "reordered-requests": "req_ids (replica): rank 2: req_ids[0] is 1, on most ranks 0",
    "other-interleave": "topology (world): rank 2: topology['interleave'] is 2, on most ranks 1",
    "other-block-size": "topology (world): rank 2: topology['block_size'] is 128, on most ranks 64",
    "other-partition": "partition['strategy'] is 'head_tail_even', on most ranks 'head_tail'",
    "other-budget": "budget (world): rank 2: budget['workspace_tokens'] is 1, on most ranks 4096",
    "early-return": "ranks are not at the same step\n  ranks 0, 1, 3: step 1\n  rank 2: step 2",
    "skipped-collective": "rank 2, step 1: collective 0: the plan has all_gather of query_heads over tp",
    "wrong-dtype": "13824 bfloat16, issued was all_gather of query_heads over tp, 13824 float32 at worker/heads.py",
    "killed": {"simulator": "rank 2: did not come", "other": "guard of step 1: rank 2 is gone: died, or ended before"},
    "stopped": {"simulator": "rank 2: did not come", "other": "guard of step 1: rank 2 did not come within 2 s"},
}
QUIET = ("other-partition", "other-budget")
"""Without a guard they change nothing that is sent or computed."""

UNGUARDED = ("stale-seq-len", "early-return", "skipped-collective", "wrong-dtype")


def check_text(kind, comm, text):
    words = WORDS[kind]
    assert (words if isinstance(words, str) else words.get(comm, words["other"])) in text, (kind, comm, text)


@pytest.mark.parametrize("kind", KINDS)
def test_simulated_ranks_with_a_guard_tell_it(kind, tmp_path):
    text, seconds = simulate(kind, "every", tmp_path)
    check_text(kind, "simulator", text)
    assert seconds < 2 * LIMIT_S + 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_simulated_ranks_without_a_guard_end_in_an_error_of_their_own(kind, tmp_path):
    text, seconds = simulate(kind, "off", tmp_path)
    assert bool(text) == (kind not in QUIET), text
    assert seconds < 2 * LIMIT_S + 10


def check_killed(folder, status, printed):
    """The job ended soon, and a rank told why, unless the launcher was faster to end it."""
    assert status != 0
    assert time.time() - float((folder / "killed.every.began").read_text()) < 60
    ranks = told(folder, "killed.every")
    for text, after in ranks.values():
        assert text == "guard of step 1: rank 2 is gone: died, or ended before"
        assert after < 2
    assert ranks or "signal 9" in printed.lower()


@pytest.mark.slow
@pytest.mark.parametrize("comm", LAUNCH)
def test_launched_ranks_tell_it(comm, tmp_path):
    """One job for all kinds that leave the ranks alive, and the last that kills one."""
    if comm == "MPI":
        pytest.importorskip("mpi4py", reason="mpi4py is an extra: pip install -c constraints.txt '.[mpi]'")
    alive = [kind for kind in KINDS if kind != "killed"]
    cases = [f"{kind}.every" for kind in alive] + [f"{kind}.off" for kind in UNGUARDED]
    status, printed = launch(comm, tmp_path, [*cases, "killed.every"])
    check_killed(tmp_path, status, printed)
    for kind in alive:
        ranks = told(tmp_path, f"{kind}.every")
        assert sorted(ranks) == [0, 1, 2, 3], printed[-2000:]
        [text] = {text for text, _ in ranks.values()}
        check_text(kind, comm, text)
        limit = LIMIT_S if kind == "stopped" else 0
        assert max(seconds for rank, (_, seconds) in ranks.items() if rank != 2) < limit + 2
    for kind in UNGUARDED:
        ranks = told(tmp_path, f"{kind}.off")
        assert sorted(ranks) == [0, 1, 2, 3]
        assert all(text for text, _ in ranks.values())
        assert any(f"over {group}" in text for text, _ in ranks.values() for group in ("tp", "pcp", "dcp"))


def test_table_holds_every_kind_and_comm_and_is_what_was_measured():
    data = json.loads(DATA.read_text(encoding="utf-8"))
    assert list(data["kinds"]) == list(KINDS) and data["limit_s"] == LIMIT_S
    for kind, by_comm in data["kinds"].items():
        assert tuple(by_comm) == COMMS
        for comm, one in by_comm.items():
            check_text(kind, comm, one["text"])
            assert one["seconds"] < 2 + LIMIT_S * (kind in ("stopped", "killed"))
    assert PAGE.read_text(encoding="utf-8") == page_with(drawn(data["kinds"]))


@pytest.mark.parametrize("text", ["killed@rank=2,step=1", "stopped@rank=0,step=10,seconds=2.5"])
def test_injection_is_read_and_spelt(text):
    assert str(Injection.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("crashed@rank=2,step=1", "no kind 'crashed'; the kinds are stale-seq-len", id="kind"),
        pytest.param("killed", "write killed@rank=R,step=S with numbers from 0", id="nothing"),
        pytest.param("killed@rank=2", "write killed@rank=R,step=S", id="no-step"),
        pytest.param("killed@rank=2,step=1,seconds=3", "write killed@rank=R,step=S", id="seconds-of-killed"),
        pytest.param("stopped@rank=2,step=1", "write stopped@rank=R,step=S,seconds=T with", id="no-seconds"),
        pytest.param("stopped@rank=2,step=1,seconds=inf", "with numbers from 0", id="endless"),
        pytest.param("killed@rank=-1,step=1", "with numbers from 0", id="negative"),
    ],
)
def test_other_spellings_are_refused(text, words):
    with pytest.raises(InputError) as refused:
        Injection.parse(text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("injection", "world", "words"),
    [
        pytest.param(Injection("killed", 4, 0), {"tp": 4}, "the run has 4 ranks and 3 steps", id="rank"),
        pytest.param(Injection("killed", 0, 3), {"tp": 4}, "the run has 4 ranks and 3 steps", id="step"),
        pytest.param(
            Injection("other-partition", 0, 0), {"tp": 2}, "nothing of this kind changes the plan", id="pcp-1"
        ),
        pytest.param(Injection("wrong-dtype", 0, 0), {"tp": 2}, "that step has no collective", id="no-collective"),
    ],
)
def test_injection_that_cannot_happen_is_refused(injection, world, words):
    case = Case("dsa", 1, world, prompts=(5,), decodes=2)
    with pytest.raises(InputError) as refused:
        check_injection(injection, case.steps, case.settings)
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", ["skipped-collective", "wrong-dtype"])
def test_faults_of_collectives_need_a_gather_by_collectives(kind):
    with pytest.raises(
        ConfigError, match=f"inject {kind}@rank=1,step=0 with gather symmetric: .*use gather collective"
    ):
        RunOptions(gather="symmetric", inject=Injection(kind, 1, 0))
    assert RunOptions(gather="symmetric", inject=Injection("dropped-request", 1, 0)).gather == "symmetric"


@pytest.mark.parametrize(
    ("kind", "field"),
    list(zip(PLANNED, ["seq_lens", *["req_ids"] * 3, "topology", "topology", "partition", "budget"], strict=True)),
)
def test_injected_plan_differs_where_the_kind_says(kind, field):
    case = Case("dsa", 1, {"tp": 2, "pcp": 2, "dcp": 4}, prompts=(30, 5, 9), decodes=2)
    batch = case.steps.batches[1]
    right, wrong = (
        plan.digests()
        for plan in (case.settings.plan(batch, 2), changed_plan(Injection(kind, 2, 1), batch, case.settings))
    )
    differ = {name for name in right if right[name] != wrong[name]}
    assert field in differ
    assert not differ & ({"model", "merge", "topology", "budget"} - {field})


def test_command_tells_and_exits_with_1(capsys):
    argv = ["run", "--prompt-lens", "20,3", "--decode-steps", "1", "--heads", "8", "-tp", "2", "-pcp", "2"]
    assert main([*argv, "--inject", "dropped-request@rank=3,step=1"]) == 1
    assert "seq_lens (replica): rank 3: " in capsys.readouterr().err
    assert main([*argv, "--inject", "dropped-request@rank=3,step=1", "--guard", "sample:2", "--timeout", "5"]) == 1
    assert "ranks planned" not in capsys.readouterr().err
    assert main([*argv, "--guard", "often"]) == 2
    assert "guard 'often': use every, sample:K" in capsys.readouterr().err
    assert main([*argv, "--inject", "killed@rank=9,step=0"]) == 2
    assert "the run has 4 ranks and 2 steps" in capsys.readouterr().err
