"""Does the guard ever raise a false alarm?  Every step of a trace, planned by each rank alone and compared.

    python benchmarks/false_alarms.py TRACE [--requests 4000]        writes benchmarks/results/false_alarms.json

Each rank plans from its own copy of the batch, and the plans are compared as the guard compares them. As a check of the
check, in every 500th step rank 1 is given another prompt length of one request: each of those must be told.
"""

import argparse
import dataclasses
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cpkit.batch import Batch  # noqa: E402
from cpkit.budget import default_budget  # noqa: E402
from cpkit.consistency import agree  # noqa: E402
from cpkit.model import load_model  # noqa: E402
from cpkit.settings import StepSettings  # noqa: E402
from cpkit.topology import Topology  # noqa: E402
from cpkit.workload import Scheduler, read_trace  # noqa: E402

WORLD = Topology(tp=2, pcp=2, dcp=4, interleave=64)
PLANT_EVERY = 500


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--save", type=Path, default=ROOT / "benchmarks" / "results" / "false_alarms.json")
    args = parser.parse_args()
    start = time.perf_counter()
    model = load_model("deepseek-v3.2")
    settings = StepSettings(WORLD, model, default_budget(model))
    trace = read_trace(args.trace, limit=args.requests)
    longest = max(request.prompt_len + request.output_len for request in trace.requests)
    scheduler = Scheduler(trace, WORLD, settings.budget, num_kv_blocks=200_000, max_model_len=longest)
    steps = alarms = planted = told = 0
    for number, step in enumerate(scheduler):
        steps += 1
        alarms += bool(agree([settings.plan(copied(step.batch), rank) for rank in range(WORLD.world_size)]))
        if number % PLANT_EVERY == 0:
            planted += 1
            plans = [settings.plan(copied(step.batch), rank) for rank in range(WORLD.world_size)]
            told += bool(agree([plans[0], settings.plan(stale(step.batch), 1), *plans[2:]]))
    result = {
        "date": date.today().isoformat(), "python": platform.python_version(), "trace": Path(args.trace).name,
        "requests": len(trace.requests), "ranks": WORLD.world_size, "steps": steps, "alarms": alarms,
        "planted": planted, "told": told, "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    args.save.write_text(json.dumps(result, indent=1) + "\n")
    print(", ".join(f"{name} {value}" for name, value in result.items()))


def copied(batch):
    """The batch as another rank holds it: equal values, nothing shared."""
    return Batch.from_json(json.loads(json.dumps(batch.to_json())))


def stale(batch):
    """The first request with one more prompt token, as a rank that missed an update would have it."""
    prompt_lens = batch.prompt_lens.copy()
    prompt_lens[0] += 1
    return dataclasses.replace(batch, prompt_lens=prompt_lens)


if __name__ == "__main__":
    main()
