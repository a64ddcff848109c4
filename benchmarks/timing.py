"""How benchmarks time work on a GPU: CUDA-graph replays, competitors in turn in the same process.

A graph of one launch, between two events, shows a few microseconds of the replay itself; short kernels are captured
`copies` times in a row and their time is that of the graph divided by the copies.
"""

import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

ROUNDS, REPLAYS = 5, 5

Work = Callable[[], Any]


def capture(work: Work, copies: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of the work, `copies` times in a row, after two runs that compile what it needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            work()
    return graph


def time_together(works: dict[str, Work], copies: int = 1) -> dict[str, float]:
    """Median milliseconds of each, measured in turn so that clock and heat are the same for all."""
    graphs = {name: capture(work, copies) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            for _ in range(REPLAYS):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times[name].append(start.elapsed_time(end) / copies)
    return {name: round(statistics.median(values), 6 if copies > 1 else 4) for name, values in times.items()}


def copy_gb_per_s() -> float:
    """Bytes read and written per second by a kernel that negates a gigabyte."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * (1 << 30) / time_together({"copy": lambda: torch.neg(source, out=target)})["copy"] / 1e6


def write_result(path: Path, **parts: Any) -> None:
    """A JSON file of one run: when, on which chip, with which versions, and the parts."""
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "chip": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        **parts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def keep_part(path: Path, name: str, part: Any) -> None:
    """Put a run's part, one_gpu or several_gpus, into a file; the other part stays, with the day of its run."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = {key: {"date": before["date"], **before[key]} for key in ("one_gpu", "several_gpus") if key in before}
    write_result(path, **{**kept, name: part})
