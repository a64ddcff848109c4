"""What the guard of a step costs: between processes of this machine, or GPUs, waiting for it or behind other work.

    python benchmarks/guard.py [--ranks 4] [--steps 400]                       writes benchmarks/results/guard.json
    torchrun --nproc-per-node 2 benchmarks/guard.py --device cuda              writes results/guard_nccl.json

exchange      the messages of all ranks, digests ready, one exchange behind another
all_gather    a collective of as many bytes for comparison: gloo's; NCCL's until the host has seen its end
check         digests of the plan, then the exchange: a step that waits for its guard
start, wait   the same begun early, with 5 ms of other work between: a sleep, or a product on the GPU until its end
watched       NCCL alone: a gather of 4 KiB, each of GATHERS in a row, with the comm's watch and without
CPU           of one rank and step, which other processes of a busy machine do not stretch as they do the time
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = {"cpu": ROOT / "benchmarks/results/guard.json", "cuda": ROOT / "benchmarks/results/guard_nccl.json"}
WORK_S = 0.005
GATHERS, TURNS = 200, 10


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes to start, where no launcher has")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", choices=RESULTS, default="cpu")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(int(os.environ["WORLD_SIZE"]), args.steps, args.device)
        return
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {args.ranks}".split()
    command = [*launch, __file__, "--steps", str(args.steps), "--device", args.device]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def measure(num_ranks, num_steps, device):
    """One rank's part; rank 0 prints and writes."""
    import torch

    from cpkit.comm.connect import make_comm
    from cpkit.consistency.guard import MESSAGE, StepGuard
    from cpkit.topology import Topology

    topology = Topology(tp=num_ranks, dcp=num_ranks, interleave=64)
    with make_comm(topology, device=device, timeout_s=60) as comm:
        plan, num_reqs = planned(topology, comm.rank)
        guard, channel = StepGuard(comm, limit_s=60), comm.side_channel()
        message, work = bytes(MESSAGE.size), other_work(device)
        names = ("exchange", "all_gather", "digests", "check", "start", "wait")
        times = {name: [] for name in names}

        def take(name, call):
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
            comm.ledger.expect(None)

        begin = time.process_time()
        for _ in range(num_steps):
            take("exchange", lambda: channel.exchange(message, 60, "exchange"))
        cpu = time.process_time() - begin
        gather = plain_gather(num_ranks, MESSAGE.size, device)
        for _ in range(num_steps):
            take("all_gather", gather)
        for step in range(num_steps):
            take("digests", plan.digests)
            take("check", lambda step=step: guard.check(2 * step, plan))
            take("start", lambda step=step: guard.start(2 * step + 1, plan))
            work()
            take("wait", guard.wait)
        if device == "cuda":
            times |= watched_gathers(comm)
    if comm.rank == 0:
        out = {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load": [round(one, 1) for one in os.getloadavg()],
            "python": platform.python_version(),
            "torch": torch.__version__,
            **({"chip": torch.cuda.get_device_name()} if device == "cuda" else {}),
            "ranks": num_ranks,
            "steps": num_steps,
            "requests": num_reqs,
            "message_bytes": MESSAGE.size,
            "exchange_cpu_us": round(cpu / num_steps * 1e6, 1),
            "us": {name: quantiles(values) for name, values in times.items()},
        }
        RESULTS[device].write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
        for name, row in out["us"].items():
            print(f"{name:10}" + "".join(f"  {key} {value:7.1f}" for key, value in row.items()), "us")
        print(f"exchange, CPU of one rank: {out['exchange_cpu_us']} us; load {out['load']}")


def planned(topology, rank):
    """A rank's plan of 63 decodes and a prefill chunk, and the number of requests."""
    import numpy as np

    from cpkit.batch import Batch
    from cpkit.budget import Budget
    from cpkit.model import load_model
    from cpkit.step import plan_step

    tables = np.arange(64 * 125).reshape(64, 125) + 1
    batch = Batch.from_lens([8000] * 64, [1] * 63 + [512], block_tables=tables)
    return plan_step(batch, topology, load_model("deepseek-v3.2"), Budget(1 << 20), rank=rank), batch.num_reqs


def other_work(device):
    """What takes about WORK_S and leaves the CPU alone."""
    import torch

    if device == "cpu":
        return lambda: time.sleep(WORK_S)
    a = torch.zeros(4096, 4096, device="cuda")

    def product():
        a @ a
        torch.cuda.synchronize()

    return product


def plain_gather(num_ranks, num_bytes, device):
    """The collective of torch that carries as much, to its end."""
    import torch

    rows = list(torch.empty(num_ranks, num_bytes, dtype=torch.uint8, device=device))
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def gather():
        torch.distributed.all_gather(rows, own)
        if device == "cuda":
            torch.cuda.synchronize()

    return gather


def watched_gathers(comm):
    """Seconds of a small gather, GATHERS in a row, with and without the watch in turn."""
    import torch

    own, watch = torch.zeros(1024, device=comm.device), comm._watch
    times = {"watched": [], "unwatched": []}
    for turn in range(TURNS + 1):
        for name, values in times.items():
            if name == "unwatched":
                watch.enter, watch.leave = lambda *_: None, lambda: None
            begin = time.perf_counter()
            for _ in range(GATHERS):
                comm.all_gather(own, "dcp", what="x")
            torch.cuda.synchronize()
            if turn:
                values.append((time.perf_counter() - begin) / GATHERS)
            if name == "unwatched":
                del watch.enter, watch.leave
    return times


def quantiles(values):
    """Microseconds at some shares of the sorted values."""
    values = sorted(values)
    return {f"p{share}": round(values[len(values) * share // 100] * 1e6, 1) for share in (10, 50, 90, 99)}


if __name__ == "__main__":
    main()
