"""The launch scripts on this machine, and what happens when a launched rank dies or cannot start."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is an extra: pip install -c constraints.txt '.[mpi]'")

from cpkit.cli.main import main
from tests.worker.test_jobs import COMMANDS, ROOT

WORLD = ["-tp", "2", "-pcp", "2", "-dcp", "4", "--heads", "8"]
PAIR = ["-tp", "2", "-dcp", "2", "--heads", "8"]
SHORT = ["--prompt-lens", "30,5", "--decode-steps", "1", "--verify", "all"]
RUN = [*SHORT, *WORLD]
LONG = ["--prompt-lens", "4000,4000", "--decode-steps", "400", *WORLD, "--verify", "none"]


def start(script, *argv, **env):
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "MPIRUN": f"{Path(sys.executable).with_name('mpirun')} --allow-run-as-root --oversubscribe",
        **env,
    }
    command = [str(ROOT / "launch" / script), *map(str, argv)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def digests(report):
    return [(rank["selections"], rank["outputs"]) for rank in report["ranks"]]


def simulated(world, folder):
    assert main(["run", *SHORT, *world, "--json", str(folder / "simulated.json")]) == 0
    return json.loads((folder / "simulated.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", ["torchrun_one_node.sh", "mpirun.sh", "torchrun_nodes.sh"])
def test_script_runs_what_the_simulation_runs(script, tmp_path):
    path = tmp_path / "report.json"
    if script == "torchrun_nodes.sh":  # two agents of two ranks each
        world, meet = WORLD, f"127.0.0.1:{free_port()}"
        jobs = [start(script, 2, 2, meet, *SHORT, *world, "--json", path) for _ in range(2)]
    else:
        world = PAIR
        jobs = [start(script, 2, *SHORT, *world, "--json", path)]
    told = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), told
    assert sum("all: no mismatch" in out for out, _ in told) == 1
    report = json.loads(path.read_text())
    assert report["comm"] == {"mpirun.sh": "mpi"}.get(script, "torch")
    alone = simulated(world, tmp_path)
    assert digests(report) == digests(alone)
    assert report["findings"]["rows"] == alone["findings"]["rows"]


@pytest.mark.slow
def test_slurm_script_starts_what_srun_would(tmp_path):
    """srun and scontrol are played by two small scripts: two tasks on one node."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\necho other\n")
    (tmp_path / "srun").write_text(
        """#!/usr/bin/env bash
[[ $1 == --kill-on-bad-exit=1 ]] || exit 9
shift
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=$rank "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit; done
"""
    )
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    port = next(port for port in range(20000, 40000, 7) if is_free(port))
    path = f"{tmp_path}:{os.environ['PATH']}"
    report = tmp_path / "report.json"
    slurm = {"SLURM_JOB_ID": str(port - 20000), "SLURM_JOB_NODELIST": "n[0-1]"}
    job = start("slurm.sbatch", *SHORT, *PAIR, "--json", report, PATH=path, **slurm)
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    assert "all: no mismatch" in out
    assert digests(json.loads(report.read_text())) == digests(simulated(PAIR, tmp_path))


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def ranks_of(job):
    """Process ids of the ranks below a launcher, by number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            env = dict(item.split("=", 1) for item in (folder / "environ").read_text().split("\0") if "=" in item)
            command = (folder / "cmdline").read_text().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        rank = env.get("OMPI_COMM_WORLD_RANK", env.get("RANK"))
        runs = "cpkit" in command[1:5] and "run" in command[1:6] and "torch.distributed.run" not in command
        if env.get("TEST_JOB") == job and rank is not None and runs and Path(command[0]).name.startswith("python"):
            found[int(rank)] = int(folder.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("script", ["torchrun_one_node.sh", "mpirun.sh"])
def test_killed_rank_ends_the_job(script):
    name = f"{script}-{os.getpid()}"
    job = start(script, 4, *LONG, TEST_JOB=name)
    try:
        deadline = time.monotonic() + 60
        while len(ranks := ranks_of(name)) < 4 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert sorted(ranks) == [0, 1, 2, 3]
        time.sleep(8)  # they have met and compute
        assert job.poll() is None
        os.kill(ranks[2], signal.SIGKILL)
        killed = time.monotonic()
        _, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert time.monotonic() - killed < 30
    assert job.returncode != 0
    assert any(words in err for words in ("rank 2", "local_rank: 2", "rank      : 2")), err[-2000:]
    assert ranks_of(name) == {}


def stderr_of(comm, program):
    """What a job whose rank 2 does as `program` says, that must fail, writes to stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*COMMANDS[comm], program, *RUN]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["gloo", "mpi"])
def test_rank_that_raises_is_told_first(comm):
    told = [line for line in stderr_of(comm, "tests.worker.failing").splitlines() if line.strip()]
    # the launcher writes to the same pipe: its banner can come before the end of the rank's line
    first_words = ("cpkit run: error: rank 2 raised ValueError: planted", "rank 2: ValueError: planted")
    assert told[0].startswith(first_words), told[:5]


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["gloo", "mpi"])
def test_rank_that_alone_is_refused_tells(comm):
    told = "cpkit run: error: rank 2: give one of a batch file, --prompt-lens and --trace"
    assert told in stderr_of(comm, "tests.worker.refused")


@pytest.mark.slow
def test_taken_port_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "cpkit", "run", *RUN]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("cpkit run: error: ")]
    assert len(lines) == 1 and f"MASTER_PORT={port}: the port is taken" in lines[0]


@pytest.mark.parametrize(
    ("script", "argv"),
    [("torchrun_one_node.sh", []), ("mpirun.sh", ["x"]), ("torchrun_nodes.sh", [2, 2, "node0"])],
    ids=["no-ranks", "not-a-number", "no-port"],
)
def test_usage_is_told(script, argv):
    job = start(script, *argv)
    _, err = job.communicate(timeout=20)
    assert job.returncode == 2 and err.startswith("usage: ") and err.count("\n") == 1
