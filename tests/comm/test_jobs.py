"""The same program under torchrun and mpirun: the simulation's bits, every fault named, and no rank left waiting."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cpkit.comm.simulated import run_ranks
from tests.comm.mixed import WORLDS, mixed, whole_numbers, without_sites
from tests.comm.plants import PLANTS

pytest.importorskip("mpi4py", reason="mpi4py is an extra: pip install -c constraints.txt '.[mpi]'")

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "tests.forking_torchrun", "--standalone", "--nproc-per-node", "4", "-m"]
MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe", "-n", "4"]
COMMANDS = {"gloo": TORCHRUN, "mpi": [*MPIRUN, sys.executable, "-m"]}


def launch(comm, folder, *scenes):
    """Run scenes of job.py on four ranks: exit status and standard error."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*COMMANDS[comm], "tests.comm.job", str(folder), *scenes]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr


DCP = "dcp (ranks 0, 2, 1, 3): all_gather of never, float32 [4], at comm/job.py"
ALONE = "was left alone in call 1 over"


def check_ended(status, stderr, says, folder):
    assert status != 0
    assert says in stderr
    assert time.time() - (folder / "failed").stat().st_mtime < 30


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["gloo", "mpi"])
def test_one_job_of_everything(comm, tmp_path):
    """Under MPI the job goes on until a rank is elsewhere, which ends it; torchrun's is closed by then."""
    if comm == "mpi":
        status, stderr = launch(comm, tmp_path, "everything", "elsewhere")
        check_ended(status, stderr, f"{ALONE} {DCP}", tmp_path)
    else:
        status, stderr = launch(comm, tmp_path, "everything")
        assert status == 0, stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for name, world in WORLDS.items():
        simulated = run_ranks(world, lambda comm: (mixed(comm), without_sites(comm.ledger.take())))
        for rank, (results, issued) in enumerate(simulated):
            check_same_bits(ranks[rank]["results"][name], results, (name, rank))
            assert ranks[rank]["issued"][name] == issued
    for plant, title in PLANTS.items():
        check_told([saved["told"].get(plant.__name__) for saved in ranks], title)
    if comm == "gloo":
        meanings = run_ranks(WORLDS["tp2-pcp2-dcp4"], whole_numbers)
        assert [saved["nccl_over_gloo"] for saved in ranks] == meanings
        assert all("NCCL does not add int16; use int32" in saved["told"]["int16"] for saved in ranks)
    source = {"gloo": "torchrun", "mpi": "MPI"}[comm]
    for saved in ranks:
        assert f"{source} started 4 ranks, but dp=1 * pp=1 * pcp=1 * tp=2 makes 2" in saved["told"]["small_world"]


def check_same_bits(found, expected, where):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), (where, key)
        assert as_bytes(found[key]) == as_bytes(tensor), (where, key)


def check_told(told, title):
    """All ranks raised the same, and it names both sides and their lines."""
    assert told == told[:1] * 4
    first, *lines = told[0].splitlines()
    assert title in first and "over world (ranks 0..3)" in first
    assert [line.split(":")[0] for line in lines] == ["  ranks 0, 1, 3", "  rank 2"]
    assert all("comm/plants.py:" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("comm", "scene", "says"),
    [
        ("gloo", "killed", f"{ALONE} {DCP}"),
        ("gloo", "elsewhere", f"rank 2 {ALONE} tp (ranks 2, 3): all_gather of never, float32 [4], at comm/job.py"),
        ("mpi", "raises", "rank 2: ValueError: planted"),
    ],
    ids=["gloo-killed", "gloo-elsewhere", "mpi-raises"],
)
def test_a_failing_rank_ends_the_job(comm, scene, says, tmp_path):
    check_ended(*launch(comm, tmp_path, scene), says, tmp_path)


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()
