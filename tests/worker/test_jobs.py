"""The same runs by four processes, under torchrun (gloo) and mpirun: the simulation's bits, outputs included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.job import CASES, summary

pytest.importorskip("mpi4py", reason="mpi4py is an extra: pip install -c constraints.txt '.[mpi]'")

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "gloo": [sys.executable, "-m", "tests.forking_torchrun", "--standalone", "--nproc-per-node", "4", "-m"],
    "mpi": [
        str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe", "-n", "4",
        sys.executable, "-m",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def simulated():
    return {str(case): summary(case) for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["gloo", "mpi"])
def test_processes_equal_the_simulation(comm, simulated, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*COMMANDS[comm], "tests.worker.job", str(tmp_path / "told.json")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert len(told) == len(CASES)
    for name, ranks in simulated.items():
        assert all(rank[3] == 0 for rank in ranks), name
        assert told[name] == json.loads(json.dumps(ranks)), name
