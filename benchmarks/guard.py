"""What the guard of a step costs: on processes of this machine, waiting for it or behind other work.

python benchmarks/guard.py [--ranks 4] [--steps 400]        writes benchmarks/results/guard.json

exchange     the messages of all ranks, digests ready, one exchange behind another
gloo         an all-gather of as many bytes, for comparison
check        digests of the plan, then the exchange: a step that waits for its guard
start, wait  the same begun early, with 5 ms of other work between, as on a GPU that still runs the step before
CPU          of one rank and step, which other processes of a busy machine do not stretch as they do the time
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
RESULTS = ROOT / "benchmarks" / "results" / "guard.json"
WORK_S = 0.005


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.ranks, args.steps)
        return
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {args.ranks}".split()
    command = [*launch, __file__, "--ranks", str(args.ranks), "--steps", str(args.steps)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def measure(num_ranks, num_steps):
    """One rank's part; rank 0 prints and writes."""
    import numpy as np
    import torch

    from cpkit.batch import Batch
    from cpkit.budget import Budget
    from cpkit.comm.connect import make_comm
    from cpkit.consistency.guard import MESSAGE, StepGuard
    from cpkit.model import load_model
    from cpkit.step import plan_step
    from cpkit.topology import Topology

    topology = Topology(tp=num_ranks, dcp=num_ranks, interleave=64)
    tables = np.arange(64 * 125).reshape(64, 125) + 1
    batch = Batch.from_lens([8000] * 64, [1] * 63 + [512], block_tables=tables)
    with make_comm(topology, timeout_s=60) as comm:
        plan = plan_step(batch, topology, load_model("deepseek-v3.2"), Budget(1 << 20), rank=comm.rank)
        guard, channel = StepGuard(comm, limit_s=60), comm.side_channel()
        message = bytes(MESSAGE.size)
        times = {name: [] for name in ("exchange", "gloo", "digests", "check", "start", "wait")}
        rows = list(torch.empty(num_ranks, MESSAGE.size, dtype=torch.uint8))
        own = torch.zeros(MESSAGE.size, dtype=torch.uint8)

        def take(name, call):
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
            comm.ledger.expect(None)

        begin = time.process_time()
        for _ in range(num_steps):
            take("exchange", lambda: channel.exchange(message, 60, "exchange"))
        cpu = time.process_time() - begin
        for _ in range(num_steps):
            take("gloo", lambda: torch.distributed.all_gather(rows, own))
        for step in range(num_steps):
            take("digests", plan.digests)
            take("check", lambda step=step: guard.check(2 * step, plan))
            take("start", lambda step=step: guard.start(2 * step + 1, plan))
            time.sleep(WORK_S)
            take("wait", guard.wait)
    if comm.rank == 0:
        micros = {name: quantiles(values) for name, values in times.items()}
        out = {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load": [round(one, 1) for one in os.getloadavg()],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ranks": num_ranks,
            "steps": num_steps,
            "requests": batch.num_reqs,
            "message_bytes": MESSAGE.size,
            "exchange_cpu_us": round(cpu / num_steps * 1e6, 1),
            "us": micros,
        }
        RESULTS.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
        for name, row in micros.items():
            print(f"{name:10}" + "".join(f"  {key} {value:7.1f}" for key, value in row.items()), "us")
        print(f"exchange, CPU of one rank: {out['exchange_cpu_us']} us; load {out['load']}")


def quantiles(values):
    """Microseconds at some shares of the sorted values."""
    values = sorted(values)
    return {f"p{share}": round(values[len(values) * share // 100] * 1e6, 1) for share in (10, 50, 90, 99)}


if __name__ == "__main__":
    main()
