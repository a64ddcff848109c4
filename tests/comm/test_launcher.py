"""Who started this process, from its environment; and what is told when a comm cannot be made."""

import subprocess
import sys

import pytest
import torch

from cpkit.comm import connect
from cpkit.comm.connect import choose, make_comm, run_program
from cpkit.comm.launcher import Launch, detect
from cpkit.errors import ConfigError
from cpkit.topology import Topology

BY_HAND = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
FIRST_OF_4 = BY_HAND | {"RANK": "0", "WORLD_SIZE": "4"}
TORCHRUN = BY_HAND | {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2"}
SRUN = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1"}
SHELL_STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        pytest.param({}, Launch("none", 0, 1, 0), id="nobody"),
        pytest.param(TORCHRUN, Launch("torchrun", 5, 8, 1), id="torchrun"),
        pytest.param(BY_HAND, Launch("torchrun", 5, 8, 0), id="torchs-variables-by-hand"),
        pytest.param({"RANK": "5", "WORLD_SIZE": "8"}, Launch("none"), id="rank-without-address"),
        pytest.param(OPEN_MPI, Launch("mpirun", 2, 4, 0), id="open-mpi"),
        pytest.param(HYDRA, Launch("mpirun", 2, 4, 2), id="mpich"),
        pytest.param(SRUN, Launch("slurm", 9, 16, 1), id="srun"),
        pytest.param(SHELL_STEP, Launch("none"), id="shell-of-a-cluster"),
        pytest.param(SRUN | TORCHRUN, Launch("torchrun", 5, 8, 1), id="torchrun-in-slurm"),
        pytest.param(SHELL_STEP | OPEN_MPI, Launch("mpirun", 2, 4, 0), id="mpirun-in-slurm"),
        pytest.param(SHELL_STEP | HYDRA, Launch("mpirun", 2, 4, 2), id="mpich-in-slurm"),
        pytest.param(SRUN | {"PMI_RANK": "9", "PMI_SIZE": "16"}, Launch("slurm", 9, 16, 1), id="srun-that-speaks-pmi"),
        pytest.param(OPEN_MPI | BY_HAND, Launch("mpirun", 2, 4, 0), id="torchs-variables-under-mpirun"),
    ],
)
def test_detect(env, launch):
    assert detect(env) == launch


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (TORCHRUN | {"RANK": "five"}, "started by torchrun, but RANK is 'five'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 with WORLD_SIZE=8: ranks count from 0"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "started by mpirun, but OMPI_COMM_WORLD_SIZE is not set"),
    ],
)
def test_a_broken_environment_is_told(env, says):
    with pytest.raises(ConfigError, match=says):
        detect(env)


@pytest.mark.parametrize(
    ("kind", "launch", "comm"),
    [
        ("auto", Launch("none"), "sim"),
        ("auto", Launch("torchrun", 0, 4), "torch"),
        ("auto", Launch("slurm", 0, 4), "torch"),
        ("auto", Launch("mpirun", 0, 4), "mpi"),
        ("torch", Launch("mpirun", 0, 4), "torch"),
        ("mpi", Launch("slurm", 0, 4), "mpi"),
        ("sim", Launch("none"), "sim"),
        ("sim", Launch("mpirun", 0, 1), "sim"),
    ],
)
def test_choose(kind, launch, comm):
    assert choose(kind, launch) == comm


@pytest.mark.parametrize(
    ("kind", "launch", "says"),
    [
        ("gloo", Launch("none"), "comm 'gloo': use one of auto, sim, torch, mpi"),
        ("torch", Launch("none"), "nobody started them: use torchrun --nproc-per-node N"),
        ("mpi", Launch("none"), "nobody started them: use mpirun -n N"),
        ("sim", Launch("torchrun", 0, 4), "torchrun started 4 processes, and each would simulate every rank"),
    ],
)
def test_choices_that_cannot_go(kind, launch, says):
    with pytest.raises(ConfigError, match=says):
        choose(kind, launch)


@pytest.fixture
def env(monkeypatch):
    """Set exactly these launch variables."""

    def set_env(variables):
        for name in {*TORCHRUN, *OPEN_MPI, *HYDRA, *SRUN}:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_env


def test_without_a_launcher_every_rank_is_simulated(env):
    env({})

    def program(comm):
        return comm.all_gather(torch.tensor([comm.rank]), "dcp", what="x").tolist()

    assert run_program(program, Topology(tp=2, dcp=2)) == {0: [0, 1], 1: [0, 1]}
    with pytest.raises(ConfigError, match="call run_program"):
        make_comm(Topology(tp=2))


@pytest.mark.parametrize(
    ("variables", "options", "says"),
    [
        pytest.param(
            TORCHRUN, {}, "torchrun started 8 ranks, but dp=1 [*] pp=1 [*] pcp=2 [*] tp=2 makes 4", id="world"
        ),
        pytest.param(FIRST_OF_4 | {"MASTER_PORT": ""}, {}, "MASTER_PORT is not set", id="no-port"),
        pytest.param(FIRST_OF_4, {"device": "cuda"}, "torch sees no GPU here", id="no-gpu"),
        pytest.param({}, {"device": "tpu"}, "device 'tpu': use cpu or cuda", id="device"),
    ],
)
def test_what_does_not_fit_is_one_line(env, monkeypatch, variables, options, says):
    env(variables)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=says) as refused:
        run_program(lambda comm: None, Topology(tp=2, pcp=2), **options)
    assert "\n" not in str(refused.value)


def test_more_ranks_than_gpus(env, monkeypatch):
    env(TORCHRUN | {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="local rank 3 has no GPU: torch sees 2 here, and NCCL wants one a rank"):
        make_comm(Topology(tp=4), device="cuda")


def test_a_port_that_is_taken(env):
    listener = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env(BY_HAND | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.port)})
    with pytest.raises(
        ConfigError, match=f"MASTER_PORT={listener.port}: the port is taken; set MASTER_PORT"
    ) as refused:
        make_comm(Topology(tp=2), timeout_s=5)
    assert "\n" not in str(refused.value)


def test_missing_extras(env, monkeypatch):
    env(OPEN_MPI)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(ConfigError, match=r"comm mpi needs mpi4py .*: pip install .* '\.\[mpi\]'"):
        make_comm(Topology(tp=4))
    monkeypatch.setattr(connect, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"torch, which is not installed: pip install .* '\.\[torch\]'"):
        make_comm(Topology(tp=4))


def test_launch_and_choice_import_no_torch():
    code = "import sys, cpkit.comm.connect as c; c.detect(); sys.exit(not {'torch', 'mpi4py'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
