"""A torch program that knows nothing of cpkit: two ranks a scene, forked; python program.py FOLDER skip killed

It imports codecache once for all: else the flight recorder does, in every rank that dumps, for three seconds.
"""

import datetime
import os
import signal
import sys

import torch
import torch._C._distributed_c10d as c10d
import torch._inductor.codecache
import torch.distributed as dist
from torch.distributed import all_reduce


def program(rank, folder, scene):
    meet, patience = f"file://{folder}/meet-{scene}", datetime.timedelta(seconds=2)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=patience)
    x = torch.ones(4)
    pair = dist.new_group([0, 1])
    for step in range(3):
        dist.all_reduce(x)
        if not (scene == "skip" and step == 1 and rank == 1):
            all_reduce(x, group=pair)  # the line that rank 1 skips
        all_reduce(x)
        dist.all_reduce(x, group=pair)
    if scene == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # the line that a killed rank never comes to


def dump(rank, folder, scene):
    """What torch's flight recorder has, in the two forms that it writes."""
    os.makedirs(f"{folder}/dumps-{scene}", exist_ok=True)
    for name, make in ((f"rank_{rank}", c10d._dump_fr_trace), (f"rank_{rank}.json", c10d._dump_fr_trace_json)):
        with open(f"{folder}/dumps-{scene}/{name}", "wb") as file:
            file.write(make())


children = []
for scene in sys.argv[2:]:
    for rank in (0, 1):
        if (child := os.fork()) == 0:
            os.environ["TORCHELASTIC_RUN_ID"] = scene
            try:
                program(rank, sys.argv[1], scene)
            finally:
                dump(rank, sys.argv[1], scene)
            sys.exit()
        children.append(child)
for child in children:
    os.waitpid(child, 0)
