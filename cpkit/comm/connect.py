"""From a topology to a running rank program: every rank simulated here, or this process as one rank of a job."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from cpkit.comm.launcher import Launch, detect
from cpkit.comm.patience import TIMEOUT_S
from cpkit.errors import ConfigError
from cpkit.topology import Topology

if TYPE_CHECKING:  # torch and mpi4py are extras: what lacks them is told when a comm is made
    import torch

    from cpkit.comm.base import Comm
    from cpkit.comm.transport import Transport

R = TypeVar("R")

KINDS = ("auto", "sim", "torch", "mpi")
_BY_LAUNCH = {"none": "sim", "torchrun": "torch", "slurm": "torch", "mpirun": "mpi"}


def run_program(
    program: "Callable[[Comm], R]",
    topology: Topology,
    *,
    kind: str = "auto",
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
) -> dict[int, R]:
    """Run `program(comm)` as each rank that this process is, and return what it returned by rank.

    kind: auto (by who started this process), sim (all ranks, as threads), torch or mpi (one rank, as launched).
    device: cpu or cuda. timeout_s: how long a rank waits for the others of a collective.
    Raises ConfigError for what is missing or does not fit, and what the program raises.
    """
    launch = detect()
    kind = choose(kind, launch)
    if kind == "sim":
        need_torch()
        from cpkit.comm.simulated import run_ranks

        results = run_ranks(topology, program, device=_rank_device(device, launch, shared=True), timeout_s=timeout_s)
        return dict(enumerate(results))
    with make_comm(topology, kind=kind, device=device, timeout_s=timeout_s) as comm:
        return {comm.rank: program(comm)}


def make_comm(
    topology: Topology, *, kind: str = "auto", device: str = "cpu", timeout_s: float = TIMEOUT_S
) -> "Transport":
    """The comm of the one rank that this process is; use it in a `with`. For simulated ranks see run_program.

    Under torch it joins the job, unless torch.distributed has been initialised before: then the job stays its owner's.
    """
    launch = detect()
    kind = choose(kind, launch)
    if kind == "sim":
        raise ConfigError("simulated ranks are threads of one process and have no comm of their own: call run_program")
    if kind == "mpi":
        need_torch()
        _need_mpi()
        from cpkit.comm.mpi import MpiComm

        return MpiComm(topology, _rank_device(device, launch, shared=True), timeout_s)
    need_torch()
    return _torch_comm(topology, launch, device, timeout_s)


def choose(kind: str, launch: Launch) -> str:
    """sim, torch or mpi: the one asked for, or by who started this process. Raises ConfigError where they cannot go."""
    if kind not in KINDS:
        raise ConfigError(f"comm {kind!r}: use one of {', '.join(KINDS)}")
    if kind == "auto":
        return _BY_LAUNCH[launch.kind]
    if kind == "sim" and launch.world_size > 1:
        raise ConfigError(
            f"{launch.kind} started {launch.world_size} processes, and each would simulate every rank: "
            "start one process without a launcher, or use comm auto"
        )
    if kind != "sim" and launch.kind == "none":
        command = {"torch": "torchrun --nproc-per-node N -m ...", "mpi": "mpirun -n N python -m ..."}[kind]
        raise ConfigError(f"comm {kind} needs ranks, and nobody started them: use {command}, or comm sim")
    return kind


def check_launch(kind: str, launch: Launch, topology: Topology) -> None:
    """Refuse what can be refused before ranks meet: no torch, a comm that nobody launched, a wrong world size."""
    need_torch()
    kind = choose(kind, launch)
    if kind != "sim":
        from cpkit.comm.transport import check_world

        check_world(topology, launch.world_size, launch.kind)


def _torch_comm(topology: Topology, launch: Launch, device: str, timeout_s: float) -> "Transport":
    import torch.distributed as dist

    from cpkit.comm.torch_dist import GlooComm, NcclComm, open_job
    from cpkit.comm.transport import check_world

    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed: install another build, or use comm sim")
    check_world(topology, launch.world_size, launch.kind)
    rank_device = _rank_device(device, launch, shared=False)
    joins = not dist.is_initialized()
    if joins:
        open_job(launch, rank_device, timeout_s)
    if rank_device.type == "cuda":
        return NcclComm(topology, rank_device, timeout_s, owns_job=joins)
    return GlooComm(topology, timeout_s, owns_job=joins)


def need_torch() -> None:
    """Raise ConfigError without torch."""
    if find_spec("torch") is None:
        raise ConfigError(
            "ranks need torch, which is not installed: pip install -c constraints.txt '.[torch]' in cpkit's checkout"
        )


def _need_mpi() -> None:
    try:
        import_module("mpi4py.MPI")
    except ImportError as missing:
        raise ConfigError(
            f"comm mpi needs mpi4py ({missing}): pip install -c constraints.txt '.[mpi]' in cpkit's checkout"
        ) from missing
    except RuntimeError as broken:  # mpi4py is there and finds no MPI library
        reason = str(broken).splitlines()[0]
        raise ConfigError(
            f"mpi4py finds no MPI library ({reason}): install one, or "
            "pip install -c constraints.txt '.[mpi]' in cpkit's checkout"
        ) from broken


def _rank_device(device: str, launch: Launch, *, shared: bool) -> "torch.device":
    """Where this rank's tensors live. shared: ranks of one machine may share a GPU."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise ConfigError(f"device {device!r}: use cpu or cuda")
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise ConfigError(
            "device cuda: torch sees no GPU here; use device cpu, or a torch built for CUDA on a GPU machine"
        )
    if launch.local_rank >= num_gpus and not shared:
        raise ConfigError(
            f"local rank {launch.local_rank} has no GPU: torch sees {num_gpus} here, and NCCL wants one a rank; "
            f"start at most {num_gpus} ranks on this machine"
        )
    return torch.device("cuda", launch.local_rank % num_gpus)
