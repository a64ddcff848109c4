"""Who started this process: torchrun, mpirun, SLURM, or nobody. Read from the environment alone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cpkit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """kind: torchrun, mpirun, slurm or none. rank, world_size: in the job; local_rank: among ranks of this machine."""

    kind: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


_ALONE = Launch("none")

# (kind, rank, world size, local rank), in the order that they are looked at: mpirun and torchrun may run inside SLURM
_TORCHRUN = ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPEN_MPI = ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_HYDRA = ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
_SLURM = ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


def detect(env: Mapping[str, str] | None = None) -> Launch:
    """The launch of this process, by default from os.environ.

    torchrun: its variables with MASTER_ADDR. mpirun: Open MPI's, or PMI's (MPICH, Intel). slurm: a step of srun, also
    one that speaks PMI; a step of one task is nobody's launch, since shells of a cluster are such steps.
    Raises ConfigError for variables that are missing from a set or are no numbers.
    """
    env = os.environ if env is None else env
    if "TORCHELASTIC_RUN_ID" in env:
        return _read(env, *_TORCHRUN)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _read(env, *_OPEN_MPI)
    step = _read(env, *_SLURM) if "SLURM_STEP_NUM_TASKS" in env else _ALONE
    if "PMI_RANK" in env:
        launch = _read(env, *_HYDRA)
        if (launch.rank, launch.world_size) != (step.rank, step.world_size):
            return launch
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        return _read(env, *_TORCHRUN)
    return step if step.world_size > 1 else _ALONE


def _read(env: Mapping[str, str], kind: str, rank: str, world_size: str, local_rank: str) -> Launch:
    values = []
    for name, default in ((rank, None), (world_size, None), (local_rank, "0")):
        text = env.get(name, default)
        if text is None or not (text.isascii() and text.isdigit()):
            state = "is not set" if text is None else f"is {text!r}"
            raise ConfigError(f"started by {kind}, but {name} {state}: it must be a whole number; mend the environment")
        values.append(int(text))
    launch = Launch(kind, *values)
    if not launch.rank < launch.world_size:
        raise ConfigError(
            f"{rank}={launch.rank} with {world_size}={launch.world_size}: ranks count from 0; mend the environment"
        )
    return launch
