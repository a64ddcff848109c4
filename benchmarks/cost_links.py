"""Time the collectives of planned steps on two GPUs of one host, for the cost model to be compared with.

    PYTHONPATH=. timeout 120 torchrun --nproc-per-node 2 benchmarks/cost_links.py    over NCCL: results/cost_links.json

The collectives are those of steps of DeepSeek-V3.2 on two ranks, with their real sizes, each size once: prefills and
decodes under pcp 2, under tp 2 with dcp 2, under pcp 2 with dcp 2, and the cost model's own of projections and experts.
Each is captured COPIES times in a CUDA graph; the time is the median replay divided by the copies. The file is written
after every size, and none is begun after LIMIT_S; `cost_check.py show` compares.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.planner.collectives import DTYPE_BYTES, Collective
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.weights import load_weights
from cpkit.topology import Topology

RESULT = Path(__file__).parent / "results" / "cost_links.json"
MODEL = "deepseek-v3.2"
COPIES, REPLAYS, LIMIT_S = 20, 15, 75

WORLDS = {
    "pcp 2": Topology(pcp=2),
    "tp 2, dcp 2": Topology(tp=2, dcp=2),
    "pcp 2, dcp 2": Topology(pcp=2, dcp=2),
}
BATCHES = {
    "prefill of 8,192 tokens, context 32,768": Batch.from_lens([32768], [8192], [32768]),
    "64 decodes, context 32,768": Batch.from_lens([32768] * 64, [1] * 64),
}


@dataclass(frozen=True)
class Call:
    """One call of a collective. seconds: predicted; kind: of their source."""

    name: str
    collective: Collective
    seconds: float
    kind: str

    @property
    def bytes(self) -> int:
        """That a rank puts into one call."""
        return self.collective.bytes // self.collective.times

    @property
    def key(self) -> tuple[str, int]:
        """What its time depends on."""
        return self.collective.op, self.bytes


def steps() -> Iterator[tuple[str, list[tuple[Call, int]]]]:
    """Each step with its calls, and how often each is made over all layers."""
    model = load_model(MODEL)
    weights = load_weights(MODEL, model)
    for world, topology in WORLDS.items():
        settings = StepSettings(topology, model, default_budget(model))
        cost = CostModel(model, weights, topology, chip("h200"))
        for what, batch in BATCHES.items():
            calls = []
            step = cost.step_cost(settings.plan(batch, 0))
            for layer in (*step.layers, step.once):
                for each in layer.collectives:
                    one, times = each.collective, each.collective.times
                    name = f"{one.op}: {one.what}, {what}, {world}"
                    calls.append((Call(name, one, each.seconds / times, each.source.kind), times * layer.num_layers))
            yield f"{what}, {world}", calls


def sizes() -> list[Call]:
    """Each operation and size once."""
    found: dict[tuple[str, int], Call] = {}
    for _, calls in steps():
        for call, _ in calls:
            found.setdefault(call.key, call)
    return list(found.values())


def work_of(collective: Collective, device: str) -> Callable[[], Any]:
    """The collective as NCCL runs it among all ranks, on bytes of the same number."""
    import torch
    import torch.distributed as dist

    ranks, num_bytes = dist.get_world_size(), collective.elements * DTYPE_BYTES[collective.dtype]
    sent = torch.zeros(-(-num_bytes // 2 // ranks) * ranks, dtype=torch.bfloat16, device=device)
    if collective.op == "all_gather":
        whole = sent.new_empty(ranks * len(sent))
        return lambda: dist.all_gather_into_tensor(whole, sent)
    if collective.op == "reduce_scatter":
        own = sent.new_empty(len(sent) // ranks)
        return lambda: dist.reduce_scatter_tensor(own, sent)
    if collective.op == "all_to_all":
        received = torch.empty_like(sent)
        return lambda: dist.all_to_all_single(received, sent)
    assert collective.op == "all_reduce", collective.op
    return lambda: dist.all_reduce(sent)


def graph_ms(work: Callable[[], Any]) -> float:
    """Median milliseconds of one call."""
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(COPIES):
            work()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / COPIES)
    return round(statistics.median(times), 5)


def measure(
    time_work: Callable[[Callable[[], Any]], float],
    keep: Callable[[list[dict[str, Any]]], None],
    device: str,
    limit_s: float = LIMIT_S,
) -> list[dict[str, Any]]:
    """Time every size; all ranks of the job enter. keep: is handed the rows after each size."""
    import torch
    import torch.distributed as dist

    begin, rows = time.monotonic(), []
    for call in sizes():
        elapsed = torch.tensor([time.monotonic() - begin], device=device)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)  # one rank's clock may not decide what only it then does
        if float(elapsed) > limit_s:
            break
        ms = time_work(work_of(call.collective, device))
        rows.append({"what": call.name, "op": call.collective.op, "bytes": call.bytes, "ms": ms})
        keep(rows)
    return rows


def main() -> int:
    import os

    import torch
    import torch.distributed as dist

    from benchmarks.timing import write_result

    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if os.environ.get("WORLD_SIZE") != "2" or torch.cuda.device_count() < 2:
        print("two GPUs, started by torchrun --nproc-per-node 2", file=sys.stderr)
        return 2
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, nccl = dist.get_rank(), ".".join(map(str, torch.cuda.nccl.version()))

    def keep(rows: list[dict[str, Any]]) -> None:
        if rank == 0:
            write_result(RESULT, nccl=nccl, rows=rows)
            print(f"{len(rows):>3}: {rows[-1]['ms']:.4f} ms  {rows[-1]['what']}", flush=True)

    rows = measure(graph_ms, keep, "cuda")
    if rank == 0:
        print(f"{len(rows)} of {len(sizes())} sizes in {RESULT}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
