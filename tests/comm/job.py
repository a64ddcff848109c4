"""What a launched rank runs: python -m tests.comm.job FOLDER SCENE... Results of rank r go to FOLDER/r.pt."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch

from cpkit.comm.connect import make_comm, run_program
from cpkit.comm.launcher import detect
from cpkit.comm.torch_dist import NcclComm, close_job, open_job
from cpkit.errors import ConfigError, DesyncError, PlanError
from cpkit.topology import Topology
from tests.comm.mixed import WORLDS, mixed, whole_numbers, without_sites
from tests.comm.plants import PLANTS, planted

WORLD = WORLDS["tp2-pcp2-dcp4"]


def everything(folder):
    """Over one job: the mixed program in every world, every planted fault, and a world of the wrong size."""
    launch = detect()
    joined = launch.kind == "torchrun"
    if joined:
        open_job(launch, torch.device("cpu"), 60)
    saved = {"results": {}, "issued": {}, "told": {}}
    for name, world in WORLDS.items():
        with make_comm(world, timeout_s=60) as comm:
            saved["results"][name] = mixed(comm)
            saved["issued"][name] = without_sites(comm.ledger.take())
    for plant in PLANTS:
        with make_comm(WORLD, timeout_s=60) as comm:
            try:
                planted(comm, plant)
            except DesyncError as error:
                saved["told"][plant.__name__] = str(error)
    try:
        make_comm(Topology(tp=2))
    except ConfigError as error:
        saved["told"]["small_world"] = str(error)
    if joined:
        with NcclComm(WORLD, torch.device("cpu"), 60) as comm:  # its order of ranks, with gloo to carry it
            saved["nccl_over_gloo"] = whole_numbers(comm)
            try:
                comm.all_reduce(torch.zeros(1, dtype=torch.int16), "dcp", what="x")
            except PlanError as error:
                saved["told"]["int16"] = str(error)
        close_job()
    torch.save(saved, folder / f"{launch.rank}.pt")


def fail(folder, scene, comm):
    """Rank 2 fails after a barrier, and the file `failed` tells when; the others need it in a collective."""
    comm.barrier("world")
    if comm.rank == 2:
        (folder / "failed").touch()
        if scene == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if scene == "raises":
            raise ValueError("planted")
    elsewhere = comm.rank == 2 and scene == "elsewhere"
    comm.all_gather(torch.zeros(4), "tp" if elsewhere else "dcp", what="never")


def main():
    folder = Path(sys.argv[1])
    for scene in sys.argv[2:]:
        if scene == "everything":
            everything(folder)
        else:
            run_program(partial(fail, folder, scene), WORLD, timeout_s=4 if scene == "elsewhere" else 60)


if __name__ == "__main__":
    main()
