"""How long planning takes: medians on this machine, beside the targets.

Other processes stretch a median of microseconds by half and more; the fastest call tells what planning itself takes,
and the load average, before and after, which of the two to read.

Run: python benchmarks/planner.py [--save benchmarks/results/planner.json] [--trace TRACE]
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.planner.chunks import Chunk
from cpkit.planner.gather import plan_gather
from cpkit.promises import check_step
from cpkit.step import plan_step
from cpkit.topology import Topology

MODEL = load_model("deepseek-v3.2")


def mixed_batch() -> Batch:
    """250 decodes behind contexts of 1k to 100k tokens and 6 prefills, 7,750 query tokens in all."""
    rng = np.random.default_rng(0)
    prefills = [1000, 1500, 500, 1500, 1000, 2000]
    context = np.concatenate([rng.integers(1_000, 100_000, 250), [5_000, 8_000, 3_000, 2_500, 9_000, 7_000]])
    query = np.array([1] * 250 + prefills)
    return Batch.from_lens(context, query, np.concatenate([context[:250] - 1, context[250:]]))


def plan_one_rank() -> dict[str, Callable[[], Any]]:
    """plan_step for one rank of the mixed step, in four worlds."""
    batch, budget = mixed_batch(), default_budget(MODEL)
    worlds = [Topology(tp=8), Topology(tp=8, dcp=8), Topology(tp=4, pcp=4), Topology(tp=4, pcp=4, dcp=16)]
    return {
        f"plan_step, one rank, 256 requests, tp={t.tp} pcp={t.pcp} dcp={t.dcp}": (
            lambda t=t: plan_step(batch, t, MODEL, budget, rank=3)
        )
        for t in worlds
    }


def chunk_plan() -> dict[str, Callable[[], Any]]:
    """The global chunk plan of one 1M-token request over dcp=8, as a plan and as an index array."""
    chunk = Chunk(0, 1, 0, 1 << 20, 1 << 20, 1, 1)
    req, keys = np.zeros(1, np.int64), np.array([1 << 17])
    plans = {i: plan_gather(chunk, req, keys, dcp_size=8, interleave=i) for i in (1, 64)}
    return {
        "global chunk plan, 1M tokens, dcp=8, as a plan": lambda: plan_gather(
            chunk, req, keys, dcp_size=8, interleave=1
        ),
        "the same materialised, interleave=1": plans[1].deinterleave_idx,
        "the same materialised, interleave=64": plans[64].deinterleave_idx,
    }


def plan_and_check_256() -> None:
    """One 1M-token prefill planned by each of 256 ranks and checked."""
    topology = Topology(pcp=32, tp=8, dcp=256)
    budget = default_budget(MODEL, max_num_batched_tokens=1 << 20)
    batch = Batch.from_lens([1 << 20], [1 << 20])
    violations = check_step([plan_step(batch, topology, MODEL, budget, rank=rank) for rank in range(256)])
    assert not violations, violations


def help_seconds() -> None:
    """`cpkit --help` in a fresh interpreter."""
    subprocess.run([sys.executable, "-m", "cpkit", "--help"], check=True, capture_output=True)


def replay(trace: str) -> dict[str, Any]:
    """A whole trace at tp=4 pcp=4 dcp=16, every rank of every step checked."""
    start = time.perf_counter()
    flags = ["simulate", trace, "-tp", "4", "-pcp", "4", "-dcp", "16", "--check", "all", "--json", "-"]
    done = subprocess.run([sys.executable, "-m", "cpkit", *flags], check=True, capture_output=True, text=True)
    report = json.loads(done.stdout)
    return {"seconds": time.perf_counter() - start, "steps": report["steps"], "violations": report["violations"]}


def measure(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median, fastest and slowest of `repeats` calls, in seconds, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="write the results as JSON")
    parser.add_argument("--trace", help="also replay this trace at tp=4 pcp=4 dcp=16 (the 4,000-request excerpt)")
    args = parser.parse_args()

    cases: list[tuple[str, Callable[[], Any], int, float]] = []
    cases += [(name, call, 2000, 300e-6) for name, call in plan_one_rank().items()]
    cases += [
        (name, call, 100 if "as a plan" in name else 30, 50e-6 if "as a plan" in name else 4e-3)
        for name, call in chunk_plan().items()
    ]
    cases += [("1M-token prefill, 256 ranks planned and checked", plan_and_check_256, 3, 2.0)]
    cases += [("cpkit --help", help_seconds, 5, 0.25)]

    load = [round(os.getloadavg()[0], 1)]
    results: list[dict[str, Any]] = []
    print(f"{'':66} {'median':>10} {'fastest':>10} {'target':>10}  ratio")
    for name, call, repeats, target in cases:
        times = measure(call, repeats)
        results.append({"name": name, "target_s": target, **times})
        print(
            f"{name:66} {human(times['median']):>10} {human(times['min']):>10} {human(target):>10}"
            f"  {times['median'] / target:4.2f}"
        )
    load.append(round(os.getloadavg()[0], 1))
    print(f"load average of the last minute, before and after: {load[0]}, {load[1]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'peak memory of all the above':66} {peak:8.2f} GiB")
    if args.trace:
        whole = replay(args.trace)
        results.append({"name": f"simulate {Path(args.trace).name}", "target_s": 90.0, **whole})
        print(f"simulate, {whole['steps']:,} steps, 16 ranks, all checked: {whole['seconds']:.1f} s (target 90 s)")
    if args.save:
        about = {"date": date.today().isoformat(), "processor": processor(), "cores": os.cpu_count()}
        about |= {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "load": load,
            "peak_gib": round(peak, 3),
        }
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


def processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def human(seconds: float) -> str:
    """2 s, 3.1 ms or 45 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


if __name__ == "__main__":
    main()
