"""`cpkit check` and `cpkit record`: exit codes, the report, and inputs that are damaged, missing or mixed."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from cpkit.cli.main import main
from tests.consistency.ranks import LOOP, A, C, dump, log_text, write_logs

ROOT = Path(__file__).parents[2]


def run(capsys, *argv):
    code = main(["check", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out + err


def test_ranks_that_agree(tmp_path, capsys):
    code, text = run(capsys, write_logs(tmp_path / "logs", LOOP, LOOP, LOOP))
    assert code == 0 and text.splitlines() == ["run r: ranks 0..2, 3 calls compared", "", "agrees"]


def test_the_report_names_who_where_and_who_waits(tmp_path, capsys):
    code, text = run(capsys, write_logs(tmp_path / "logs", LOOP * 2, LOOP * 2, [A, C, *LOOP]))
    assert code == 1
    for words in (
        "group '0' (ranks 0..2), call 2: missing call: not made by rank 2",
        "ranks 0, 1     0  broadcast float32 [4]   a.py:2",
        "rank 2         0  all_gather float32 [4]  a.py:3",
        "ahead: ranks 0, 1 with 6 calls; rank 2 made 5 calls",
        "DIVERGES",
    ):
        assert words in text, text


def test_json_alone(tmp_path, capsys):
    logs = write_logs(tmp_path / "logs", LOOP, [*LOOP[:2]])
    assert main(["check", str(logs), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    [found] = data["runs"][0]["divergences"]
    assert data["format"] == "cpkit-check-1" and data["diverges"] is True
    assert (found["kind"], found["ahead"], found["behind"], found["calls"]) == (
        "never came",
        [0],
        [1],
        {"0": 3, "1": 2},
    )
    assert found["entered"][1] == {"ranks": [1], "op": None}


def test_a_cut_last_line_is_named_and_no_more(tmp_path, capsys):
    logs = write_logs(tmp_path / "logs", LOOP, LOOP)
    path = logs / "rank1.jsonl"
    path.write_text(path.read_text()[:-4])
    code, text = run(capsys, logs)
    assert code == 0 and f"left out: {path}: its last line is cut off" in text


@pytest.mark.parametrize("rest", [LOOP, [A, C, *LOOP]], ids=["rest-agrees", "rest-diverges"])
def test_a_missing_file_is_named_and_the_rest_compared(tmp_path, capsys, rest):
    logs = write_logs(tmp_path / "logs", LOOP * 2, LOOP, LOOP * 2 if rest is LOOP else rest)
    (logs / "rank1.jsonl").unlink()
    code, text = run(capsys, logs)
    assert "not compared: run r: no file of rank 1" in text
    assert code == (2 if rest is LOOP else 1)


def test_a_rank_beyond_those_there_is_missing(tmp_path, capsys):
    logs = write_logs(tmp_path / "logs", LOOP, LOOP, world=3)
    code, text = run(capsys, logs)
    assert code == 2 and "no file of rank 2" in text and "INCOMPLETE" in text


def test_where_nothing_can_be_read_nothing_is_said_to_agree(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("none of these")
    code, text = run(capsys, tmp_path / "notes.txt")
    assert code == 2 and "NOTHING COMPARED: give logs" in text and "agree" not in text


def test_mixed_runs_are_compared_apart(tmp_path, capsys):
    logs = write_logs(tmp_path / "logs", LOOP, LOOP)
    for rank, calls in enumerate((LOOP, LOOP[:1])):
        (logs / f"later{rank}.jsonl").write_text(log_text(rank, calls, run="later"))
    code, text = run(capsys, logs)
    assert code == 1 and "run r: ranks 0, 1, 3 calls" in text and "run later: ranks 0, 1, 3 calls" in text
    assert text.count("never came") == 1


def test_two_logs_of_one_rank(tmp_path, capsys):
    logs = write_logs(tmp_path / "logs", LOOP, LOOP)
    (logs / "rank1b.jsonl").write_text(log_text(1, LOOP[:1]))
    code, text = run(capsys, logs)
    assert code == 2 and "rank 1 of run r is in" in text


def test_a_world_that_cannot_be_is_bad_input(tmp_path, capsys):
    logs = write_logs(tmp_path / "logs", LOOP, LOOP)
    (logs / "far.jsonl").write_text(log_text(10**9, LOOP))
    code, text = run(capsys, logs)
    assert code == 2 and "it tells of rank 1000000000; worlds have at most 65536 ranks" in text


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_foreign_pickle_is_named_unrun_and_the_rest_compared(tmp_path, capsys):
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(LOOP), 2))
    (tmp_path / "nccl_trace_rank_2").write_bytes(pickle.dumps({"entries": Runs(tmp_path / "ran")}))
    (tmp_path / "notes.txt").write_text("what we saw")
    code, text = run(capsys, tmp_path)
    assert code == 2 and not (tmp_path / "ran").exists()
    assert "asks for posix.system" in text and "notes.txt: neither" in text and "3 calls compared" in text


def test_saved_plans(tmp_path, capsys):
    step = ["--query-lens", "1,7", "-tp", "2", "-pcp", "2", "-dcp", "4"]
    plans = [str(tmp_path / f"{name}.npz") for name in "abc"]
    for file, lens in zip(plans, ("10,9", "10,9", "10,8"), strict=True):
        assert main(["plan", "--seq-lens", lens, *step, "--save", file]) == 0
    capsys.readouterr()
    assert run(capsys, *plans[:2])[0] == 0
    code, text = run(capsys, *plans)
    assert code == 1 and f"of {plans[2]}: seq_lens[1] is 8, on most ranks 9" in text


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_compare(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    code, text = run(capsys, tmp_path / name)
    assert code == 2 and text.startswith("cpkit check: error: ") and text.count("\n") == 1


def record(folder, *command):
    argv = [sys.executable, "-m", "cpkit", "record", "--out", str(folder), "--", *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_record_hands_on_arguments_streams_and_exit_code(tmp_path):
    program = "import sys; print(sys.argv[1:]); sys.exit(7)"
    done = record(tmp_path / "logs", sys.executable, "-c", program, "--flag", "--", "-x")
    assert (done.returncode, done.stdout) == (7, "['--flag', '--', '-x']\n")
    assert done.stderr.count("\n") == 1 and list((tmp_path / "logs").iterdir()) == []


def test_record_refuses_a_command_that_is_not_there(tmp_path):
    done = record(tmp_path / "logs", "no-such-command")
    assert done.returncode == 2 and "no-such-command: there is no such command" in done.stderr


def test_check_imports_no_torch(tmp_path):
    write_logs(tmp_path / "logs", LOOP, LOOP)
    program = (
        "import sys; from cpkit.cli.main import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", program, "check", str(tmp_path / "logs")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "False\n")
