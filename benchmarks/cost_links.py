"""Time the collectives of planned steps on two GPUs of one host, for the cost model to be compared with.

    torchrun --nproc-per-node 2 benchmarks/cost_links.py     (PYTHONPATH=.; NCCL; writes results/cost_links.json)

The collectives are those of steps of DeepSeek-V3.2 on two ranks, with their real sizes: prefills and decodes under
pcp 2, under tp 2 with dcp 2, and the cost model's own of projections and experts. Each is captured COPIES times in a
CUDA graph; the time is the median replay divided by the copies. `benchmarks/cost_check.py docs` fills the page.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
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
COPIES, REPLAYS = 20, 15


def step_collectives() -> Iterator[tuple[str, Collective, float, str]]:
    """What travels in the steps, each size once: name, collective, seconds predicted, and the kind of their source."""
    model = load_model(MODEL)
    weights = load_weights(MODEL, model)
    seen = set()
    for world, topology in (("pcp 2", Topology(pcp=2)), ("tp 2, dcp 2", Topology(tp=2, dcp=2))):
        settings = StepSettings(topology, model, default_budget(model))
        cost = CostModel(model, weights, topology, chip("h200"))
        for name, batch in (
            ("prefill 8,192", Batch.from_lens([32768], [8192], [32768])),
            ("64 decodes", Batch.from_lens([32768] * 64, [1] * 64)),
        ):
            step = cost.step_cost(settings.plan(batch, 0))
            for layer in (*step.layers, step.once):
                for each in layer.collectives:
                    collective = each.collective
                    size = collective.op, collective.bytes // collective.times
                    if size not in seen:
                        seen.add(size)
                        what = f"{collective.what}, {name}, {world}"
                        yield what, collective, each.seconds / collective.times, each.source.kind


def call(collective: Collective) -> Callable[[], Any]:
    """The collective as NCCL runs it among all ranks, on bytes of the same number."""
    import torch
    import torch.distributed as dist

    sent = torch.zeros(collective.elements * DTYPE_BYTES[collective.dtype] // 2, dtype=torch.bfloat16, device="cuda")
    ranks = dist.get_world_size()
    if collective.op == "all_gather":
        whole = sent.new_empty(ranks * len(sent))
        return lambda: dist.all_gather_into_tensor(whole, sent)
    if collective.op == "reduce_scatter":
        own = sent.new_empty(len(sent) // ranks)
        return lambda: dist.reduce_scatter_tensor(own, sent)
    if collective.op == "all_to_all":
        received = torch.empty_like(sent)
        return lambda: dist.all_to_all_single(received, sent)
    return lambda: dist.all_reduce(sent)


def time_call(work: Callable[[], Any]) -> float:
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


def main() -> int:
    import os

    import torch
    import torch.distributed as dist

    from benchmarks.timing import write_result

    if os.environ.get("WORLD_SIZE") != "2" or torch.cuda.device_count() < 2:
        print("two GPUs, started by torchrun --nproc-per-node 2", file=sys.stderr)
        return 2
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows = []
    for what, collective, _, _ in step_collectives():
        size, ms = collective.bytes // collective.times, time_call(call(collective))
        rows.append({"what": what, "op": collective.op, "bytes": size, "ms": ms})
    if dist.get_rank() == 0:
        write_result(RESULT, nccl=".".join(map(str, torch.cuda.nccl.version())), rows=rows)
        print(f"{len(rows)} collectives in {RESULT}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
