"""The command as a shell sees it: exit codes, streams, pipes, and what it imports."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import cpkit

ROOT = Path(cpkit.__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
STEP = ["--seq-lens", "10,9", "--query-lens", "1,7"]


def run(*args, **options):
    return subprocess.run(
        [sys.executable, "-m", "cpkit", *args], env=ENV, capture_output=True, text=True, timeout=60, **options
    )


def trace_file(path, num_reqs, prompt=700, output=40):
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    lines += [f"{i * 0.05},{prompt + i},{output}" for i in range(num_reqs)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"cpkit {cpkit.__version__}\n")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        pytest.param([], "the following arguments are required: COMMAND", id="no-command"),
        pytest.param(["plan", "--xyz"], "plan: error: unrecognized arguments: --xyz (see", id="unknown-flag"),
        pytest.param(
            ["plan", "--seq-len=10"], "--seq-len=10; did you mean --seq-lens? (see cpkit plan", id="near-flag"
        ),
        pytest.param(["plan", *STEP, "-tp", "2", "-dcp", "3"], "dcp=3 with tp=2 pcp=1", id="illegal-topology"),
        pytest.param(["plan", "missing.json"], "missing.json: No such file", id="missing-batch"),
        pytest.param(["simulate", "missing.csv"], "missing.csv: No such file", id="missing-trace"),
        pytest.param(
            ["plan", *STEP, "--save", "no/such/dir.npz"], "no/such/dir.npz: there is no folder", id="no-folder"
        ),
        pytest.param(["plan", *STEP, "--save", ""], "the name of an output file is empty", id="no-name"),
        pytest.param(["plan", *STEP, "--save", "/dev/full"], "No space left", id="disk-full"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(tmp_path, argv, reason):
    done = run(*argv, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("cpkit")
    assert reason in done.stderr


def test_a_reader_that_leaves_is_no_error():
    shell = f"{sys.executable} -m cpkit plan {' '.join(STEP)} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], env=ENV, capture_output=True, text=True, timeout=60)
    first, code = done.stdout.splitlines()
    assert first.startswith("Step ") and code == "0" and done.stderr == ""


def test_a_closed_stdout_is_no_error():
    """The reader has gone before the first byte, and the help is argparse's own print."""
    for argv in ("--help", f"plan {' '.join(STEP)}"):
        shell = f"{{ sleep 0.6; {sys.executable} -m cpkit {argv}; echo $? >&2; }} | true"
        done = subprocess.run(["bash", "-c", shell], env=ENV, capture_output=True, text=True, timeout=60)
        assert done.stderr.split() == ["0"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("command", ["plan", "simulate", "--help"])
def test_a_stream_that_was_closed_from_the_start_is_no_error(tmp_path, command, closed):
    trace = trace_file(tmp_path / "trace.csv", 2)
    argv = {"plan": ["plan", *STEP], "simulate": ["simulate", trace, "--processes", "1"], "--help": ["--help"]}[command]
    shell = f"{shlex.join([sys.executable, '-m', 'cpkit', *argv])} {closed}"
    done = subprocess.run(["bash", "-c", shell], env=ENV, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_json_to_stdout_is_json_alone(tmp_path):
    plan = run("plan", *STEP, "-tp", "2", "-pcp", "2", "-dcp", "4", "--json")
    assert plan.returncode == 0 and json.loads(plan.stdout)["padded"] == 5
    simulation = run("simulate", trace_file(tmp_path / "trace.csv", 4), "-tp", "2", "-dcp", "2", "--json", "-")
    assert simulation.returncode == 0 and json.loads(simulation.stdout)["requests"] == 4
    assert plan.stderr == simulation.stderr == ""


@pytest.mark.parametrize(
    ("argv", "modules"),
    [
        pytest.param(["--help"], {"torch", "numpy"}, id="help"),
        pytest.param(["plan", "--help"], {"torch", "numpy"}, id="plan-help"),
        pytest.param(["plan", *STEP], {"torch"}, id="plan"),
        pytest.param(["simulate", "TRACE", "--processes", "1"], {"torch"}, id="simulate"),
    ],
)
def test_heavy_modules_stay_out(tmp_path, argv, modules):
    trace = trace_file(tmp_path / "trace.csv", 2)
    argv = [trace if arg == "TRACE" else arg for arg in argv]
    program = (
        "import sys; from cpkit.cli.main import main; code = main(sys.argv[1:]); "
        f"print(sorted({modules!r} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], env=ENV, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_planning_processes_end_with_the_one_that_replays(tmp_path):
    """Killed outright, it can tell them nothing; they are found by their process group."""
    trace = trace_file(tmp_path / "trace.csv", 400, prompt=3000, output=400)
    argv = [sys.executable, "-m", "cpkit", "simulate", trace, "-tp", "4", "-pcp", "2", "-dcp", "8", "--processes", "2"]
    with subprocess.Popen(
        argv, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 30
        while len(group_members(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(group_members(process.pid)) >= 3
        process.kill()
        process.wait()
        assert leftovers(process.pid) == []


def test_a_planning_process_that_is_killed_is_one_line(tmp_path):
    trace = trace_file(tmp_path / "trace.csv", 400, prompt=3000, output=400)
    argv = [sys.executable, "-m", "cpkit", "simulate", trace, "-tp", "4", "-pcp", "2", "-dcp", "8", "--processes", "2"]
    with subprocess.Popen(
        argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 30
        while not (planners := planning_processes(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(planners[0], signal.SIGKILL)
        out, err = process.communicate(timeout=30)
        assert leftovers(process.pid) == []
    assert (process.returncode, out) == (2, "")
    assert err.count("\n") == 1 and "one of 2 planning processes was ended from outside" in err


def planning_processes(group):
    """Those of a process group that multiprocessing has started to run tasks."""
    return [pid for pid in group_members(group) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def leftovers(group):
    """Processes of a group that are still there after a while: multiprocessing's own helper ends a little later."""
    deadline = time.monotonic() + 10
    while (members := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return members


def group_members(group):
    """Live processes of a process group, from /proc."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                members.append(int(stat.parent.name))
    return members


def test_a_name_that_the_terminal_cannot_write(tmp_path):
    trace = trace_file(tmp_path / "\u65e5.csv", 1)
    argv = [sys.executable, "-m", "cpkit", "simulate", trace, "--processes", "1"]
    env = {**ENV, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "\\u65e5.csv" in done.stdout


@pytest.mark.parametrize(
    ("processes", "strikes"),
    [
        pytest.param(1, 1, id="one-process"),
        pytest.param(2, 1, id="two-processes"),
        pytest.param(2, 2, id="struck-again-while-they-end"),
    ],
)
def test_ctrl_c_reports_what_there_is(tmp_path, processes, strikes):
    """As a terminal does it: the signal goes to the whole process group, here once the progress line shows steps."""
    trace = trace_file(tmp_path / "trace.csv", 400, prompt=3000, output=400)
    out = tmp_path / "report.json"
    argv = ["simulate", trace, "-tp", "4", "-pcp", "4", "-dcp", "16", "--json", str(out)]
    terminal, stderr = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "cpkit", *argv, "--processes", str(processes)],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    ) as process:
        shown = b""
        while not re.search(rb"step \d+ .* requests .* steps/s", shown):
            shown += os.read(terminal, 1000)
        for _ in range(strikes):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.05)
        stdout, _ = process.communicate(timeout=30)
        assert leftovers(process.pid) == []
    os.close(stderr)
    with suppress(OSError):  # how Linux says that the other end is closed
        while more := os.read(terminal, 1000):
            shown += more
    os.close(terminal)
    assert process.returncode == 130 and b"Traceback" not in shown
    assert "INTERRUPTED" in stdout
    report = json.loads(out.read_text())
    assert report["complete"] is False and report["steps"] > 0 and report["finished"] < 400
