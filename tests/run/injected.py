"""Runs with a fault injected, on ranks of any kind: what every rank raised, and when.

python -m tests.run.injected FOLDER SIZE DEVICE KIND.GUARD...

Each kind over one job of SIZE ranks on DEVICE, cpu or cuda; rank r writes FOLDER/KIND.GUARD.r.
"""

import faulthandler
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch

from cpkit.activations.generate import Generated
from cpkit.comm.connect import make_comm
from cpkit.comm.launcher import detect
from cpkit.comm.simulated import run_ranks
from cpkit.comm.transport import Transport
from cpkit.oracle import Oracle
from cpkit.run import execute
from cpkit.run.inject import Injector
from cpkit.run.injection import Injection
from cpkit.worker.token_activations import TokenActivations
from tests.worker.worlds import Case

WORLDS = {2: {"pcp": 2, "dcp": 2}, 4: {"tp": 2, "pcp": 2, "dcp": 4}}
STEP = 1
LIMIT_S = 2.0


class TimedInjector(Injector):
    """Notes when the fault is due, in a file, since the rank may be killed there."""

    began = None  # of a run that is not timed

    def leaves(self, step):
        if self.began is not None and self.due(step) is not None:
            self.began.write_text(str(time.time()))
        return super().leaves(step)


execute.Injector = TimedInjector


def culprit(size):
    """Of two ranks the last, of four the third."""
    return {2: 1, 4: 2}[size]


def program(kind, size, guard):
    """The run with a fault of a kind, its guard, and the world of its ranks."""
    case = Case("dsa", 1, WORLDS[size], prompts=(30, 5, 9), decodes=2)
    steps, settings = case.steps, case.settings
    oracle = Oracle(TokenActivations(Generated(), steps.content, settings.model.num_heads))
    inject = kind and Injection(kind, culprit(size), STEP, 2 * LIMIT_S if kind == "stopped" else 0.0)
    verify = "none" if guard == "every" else "all"
    options = execute.RunOptions(verify=verify, backend="torch", guard=guard, inject=inject, timeout_s=LIMIT_S)

    def run(comm):
        first = execute.run_rank(comm, steps, settings, oracle, options).findings.first
        if first is not None:
            raise AssertionError(f"mismatch in {first}")

    return settings.topology, run


def tell(run):
    """What a run raises, or nothing, and when."""
    try:
        run()
    except Exception as error:
        return {"text": str(error), "at": time.time()}
    return {"text": "", "at": time.time()}


def simulate(kind, guard, folder, size=4):
    """All ranks here: what the run raised, and how many seconds after the fault."""
    TimedInjector.began = folder / f"{kind}.{guard}.began"
    topology, run = program(kind, size, guard)
    told = tell(lambda: run_ranks(topology, run, timeout_s=LIMIT_S))
    return told["text"], told["at"] - float(TimedInjector.began.read_text())


def in_world(device, topology, run):
    """This process as a rank of a world of its own."""
    with make_comm(topology, device=device, timeout_s=LIMIT_S) as comm:
        run(comm)


def main():
    folder, size, device, *cases = sys.argv[1:]
    launch = detect()
    meet = join(launch, device)
    for case in cases:
        kind, guard = case.split(".")
        TimedInjector.began = Path(folder) / f"{kind}.{guard}.began"
        told = tell(partial(in_world, device, *program(kind, int(size), guard)))
        (Path(folder) / f"{kind}.{guard}.{launch.rank}").write_text(json.dumps(told))
        faulthandler.cancel_dump_traceback_later()  # a rank on a GPU that has failed is to end; here it goes on
        meet()


def join(launch, device):
    """A barrier over a job that outlives its worlds."""
    if launch.kind == "torchrun":
        from cpkit.comm.torch_dist import open_job

        open_job(launch, torch.device(device, launch.local_rank) if device == "cuda" else torch.device(device), 60)
        return torch.distributed.barrier
    from mpi4py import MPI

    from cpkit.comm.mpi import MpiComm

    wait, kept = MpiComm._wait, []  # what unfinished requests still write to is kept
    MpiComm._abandon = Transport._abandon
    MpiComm._wait = lambda self, request: (kept.append(request), wait(self, request))
    return MPI.COMM_WORLD.Barrier


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # worlds that failed are left as they are: nothing of them is closed in order
