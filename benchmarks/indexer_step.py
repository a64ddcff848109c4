"""Time the whole indexer step of one layer, on one GPU and on several; writes benchmarks/results/indexer_step.json.

    PYTHONPATH=. python benchmarks/indexer_step.py [--peers DIR]
    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/indexer_step.py

A step prefills the last 8,192 tokens of a context of DeepSeek-V3.2: 64 index heads, 2,048 keys picked; indexer_rank.py
draws its stages. On several GPUs PCP splits the query tokens, DCP the stored keys; `one rank` is run by each GPU alone
in the same job, and the speed-up is its time over that of a world, the slowest rank's both. Every world must select
the keys that one rank selects, to the bit, before it is timed.

Stages lie between events on the stream; the host queues a step behind a wait of some milliseconds, so that launches
do not show. `listed` selects without written logits. DIR holds the peers (`deep_gemm/`, `vllm_c.so`), which run on one
GPU. The floor: products of fp8 matrices and bytes, each once, at the rates of the same run; logits are in no floor.
Either run replaces its own part of the file, context by context.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gather_ranks import peer_copy_gb_per_s
from benchmarks.indexer import ceilings
from benchmarks.indexer_rank import Activations, Mark, PeerStep, RankStep, make_activations
from benchmarks.timing import keep_part
from cpkit.budget import default_budget
from cpkit.comm.base import Comm
from cpkit.comm.connect import make_comm
from cpkit.comm.key_gather import KeyGather, make_key_gather
from cpkit.comm.launcher import Launch, detect
from cpkit.comm.simulated import run_ranks
from cpkit.comm.symmetric import PeerGroup
from cpkit.comm.torch_dist import NcclComm, close_job, open_job
from cpkit.kernels.key_shards import packed_bytes
from cpkit.kernels.mqa_logits import mqa_logits
from cpkit.kernels.topk import topk_reference
from cpkit.layers import Layer
from cpkit.model import load_model
from cpkit.settings import StepSettings
from cpkit.topology import Topology
from cpkit.worker.score import quantize_queries

MODEL = "deepseek-v3.2"
CONTEXTS = (32_768, 131_072, 524_288, 1 << 20)
NUM_NEW = 8192
ROUNDS = 5
AHEAD_CYCLES = 20_000_000
"""Of the GPU, about 10 ms: the host queues a step meanwhile."""
SPEED_UP, SPEED_UP_FROM = 1.9, 131_072
RESULT = Path("benchmarks/results/indexer_step.json")


@dataclass(frozen=True, slots=True)
class World:
    """How ranks share a step. gather: how they gather keys, under PCP + DCP."""

    topology: Topology
    gather: str = ""


def worlds_of(size: int) -> dict[str, World]:
    """Ways of `size` ranks to share a step; keys are dealt out in blocks."""
    shared = partial(Topology, interleave=64)
    return {
        f"pcp {size}": World(shared(pcp=size)),
        f"pcp {size}, dcp {size}": World(shared(pcp=size, dcp=size), "collective"),
        f"pcp {size}, dcp {size}, symmetric": World(shared(pcp=size, dcp=size), "symmetric"),
        f"tp {size}, dcp {size}": World(shared(tp=size, dcp=size)),
    }


def settings_of(topology: Topology, context: int, **limits: int) -> tuple[StepSettings, Layer]:
    """A deployment whose workspace holds the context twice, as PCP's two rows of a request take it; and a layer."""
    model = load_model(MODEL)
    layer = next(layer for layer in model.layers if layer.index and layer.runs_index)
    return StepSettings(topology, model, default_budget(model, workspace_tokens=2 * context + 4096, **limits)), layer


class Marks:
    """Milliseconds of each stage, between events on the current stream."""

    def __init__(self) -> None:
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self("start")

    def __call__(self, stage: str) -> None:
        """Put the end of a stage on the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((stage, event))

    def read(self) -> dict[str, float]:
        """Stages in their order, then `total`; waits for the device."""
        torch.cuda.synchronize()
        ms: dict[str, float] = {}
        for (_, before), (stage, event) in zip(self._events, self._events[1:], strict=False):
            ms[stage] = ms.get(stage, 0.0) + before.elapsed_time(event)
        return {**ms, "total": self._events[0][1].elapsed_time(self._events[-1][1])}


def time_rounds(run: Callable[[Mark], Any], comm: Comm) -> dict[str, Any]:
    """Medians of the slowest rank by stage, and the least and the most of the total."""
    rounds = []
    for _ in range(ROUNDS):
        comm.barrier("world")
        torch.cuda._sleep(AHEAD_CYCLES)
        marks = Marks()
        run(marks)
        rounds.append(marks.read())
    times = torch.tensor([list(ms.values()) for ms in rounds], dtype=torch.float64, device=comm.device)
    if dist.is_initialized():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    by_stage = dict(zip(rounds[0], times.T.tolist(), strict=True))
    ms = {stage: round(statistics.median(each), 4) for stage, each in by_stage.items()}
    return {"ms": ms, "spread_ms": [round(min(by_stage["total"]), 4), round(max(by_stage["total"]), 4)]}


def floor_ms(step: RankStep, rates: dict[str, float]) -> float:
    """Products at the fp8 rate; queries, keys and selection read and written once; remote keys at the peers' rate."""
    tokens, heads, _ = step.q.shape
    remote = packed_bytes(step.num_keys(), 128) * (step.comm.size - 1) if step.gather is not None else 0
    num_bytes = tokens * heads * 128 * 3 + 2 * packed_bytes(step.num_keys(), 128) + 8 * tokens * step.selector.topk
    ms = 2 * 128 * heads * step.num_scores() / rates["fp8_tflops"] / 1e9 + num_bytes / rates["copy_gb_per_s"] / 1e6
    return ms + (remote / rates["peer_copy_gb_per_s"] / 1e6 if remote else 0.0)


def select(step: RankStep, way: str) -> torch.Tensor:
    """[tokens, k] sorted positions."""
    return torch.cat(step.run(way, lambda stage: None)).int().sort(dim=1).values


def check_some_rows(step: RankStep, found: torch.Tensor) -> None:
    """A step on one rank against full sorts of some rows of logits."""
    some = torch.arange(0, len(found), max(len(found) // 8, 1), device=found.device)
    [(runs, table)] = step.sets
    start, end = (torch.cat([getattr(run, name) for run in runs])[some] for name in ("key_start", "key_end"))
    queries = quantize_queries(step.q[some], step.weights[some], backend=step.backend)
    logits = mqa_logits(queries.q, step.workspace(table), queries.weights, start, end, backend=step.backend)
    want = topk_reference(logits, start, end, step.selector.topk).sort(dim=1).values
    assert torch.equal(found[some], want), "one rank selects other keys than a sort"


def run_world(
    comm: Comm,
    world: World,
    data: Activations,
    rates: dict[str, float],
    want: torch.Tensor | None,
    gather: KeyGather | None = None,
) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """Rows of one world and context, and the selection of this rank's tokens; want: that of all tokens by one rank."""
    torch.cuda.set_device(comm.device)  # simulated ranks are threads, which start on the first GPU
    settings, layer = settings_of(world.topology, data.context)
    step = RankStep(comm, settings, layer, data, "triton", gather)
    rows = []
    for way in step.ways:
        found = select(step, way)
        if want is None:
            check_some_rows(step, found)
            want = found
        assert torch.equal(found, want[step.own_tokens]), f"{world}, {data.context}, {way}: other keys than one rank's"
        timed = time_rounds(partial(step.run, way), comm)
        rows.append({"context": data.context, "way": way, **timed, "floor_ms": round(floor_ms(step, rates), 4)})
    if gather is not None:
        gather.check()
    comm.ledger.take()
    assert want is not None
    return rows, want


def one_rank(
    device: torch.device, data: Activations, rates: dict[str, float]
) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """A step without other ranks, on this process's GPU."""
    world = World(Topology(interleave=64))
    [(rows, found)] = run_ranks(world.topology, lambda comm: run_world(comm, world, data, rates, None), device=device)
    return [{"world": "one rank", **row} for row in rows], found


def peer_rows(peers: Path, data: Activations, rates: dict[str, float]) -> list[dict[str, Any]]:
    """The published kernels on the same step."""
    settings, layer = settings_of(Topology(interleave=64), data.context)

    def program(comm: Comm) -> dict[str, Any]:
        step = PeerStep(comm, settings, layer, data, "triton")
        step.run("written", lambda stage: None)
        timed = time_rounds(partial(step.run, "written"), comm)
        return {"world": "one rank", "context": data.context, "way": "peers", **timed}

    return run_ranks(settings.topology, program, device="cuda:0")


def load_peers(folder: Path) -> None:
    sys.path.insert(0, str(folder.resolve()))
    import deep_gemm

    PeerStep.deep_gemm = deep_gemm
    torch.ops.load_library(str((folder / "vllm_c.so").resolve()))


def single(contexts: list[int], heads: int, peers: Path | None, keep: Callable[[str, Any], None]) -> None:
    """One GPU, beside the peers if they are there."""
    device, rates, rows = torch.device("cuda", 0), ceilings(), []
    if peers:
        load_peers(peers)
    for context in contexts:
        data = make_activations(context, NUM_NEW, heads, device)
        own, _ = one_rank(device, data, rates)
        beside = peer_rows(peers, data, rates) if peers else []
        for row in own:
            for peer in beside:
                row["times_faster_than_peers"] = round(peer["ms"]["total"] / row["ms"]["total"], 3)
            rows.append(row)
            print_row(row)
        for row in beside:
            rows.append(row)
            print_row(row)
        keep("one_gpu", {"rates": rates, "rows": rows})


def several(launch: Launch, contexts: list[int], heads: int, keep: Callable[[str, Any], None]) -> None:
    """Every world of the job's ranks, beside one rank alone."""
    device, rates = torch.device("cuda", launch.local_rank), ceilings()
    rows: list[dict[str, Any]] = []
    alone, wanted = {}, {}

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        if launch.rank == 0:
            print_row(row)
            keep("several_gpus", {"gpus": launch.world_size, "rates": rates, "rows": rows})

    for context in contexts:
        own, wanted[context] = one_rank(device, make_activations(context, NUM_NEW, heads, device), rates)
        for row in own:
            alone[context, row["way"]] = row["ms"]["total"]
            add(row)
    for name, world in worlds_of(launch.world_size).items():
        with make_comm(world.topology, kind="torch", device="cuda", timeout_s=60) as comm:
            gather = None
            if world.gather:
                largest = max(contexts) // launch.world_size + 64
                options = {"dim": 128, "max_keys": largest, "backend": "triton", "timeout_s": 30}
                gather = make_key_gather(comm, world.gather, **options)
                if "peer_copy_gb_per_s" not in rates and isinstance(comm, NcclComm):
                    peers = PeerGroup(comm, "dcp", timeout_s=20)
                    rates["peer_copy_gb_per_s"] = peer_copy_gb_per_s(peers, comm.group("dcp").place)
            for context in contexts:
                data = make_activations(context, NUM_NEW, heads, device)
                for row in run_world(comm, world, data, rates, wanted[context], gather)[0]:
                    base = alone[context, "written" if row["way"] == "candidates" else row["way"]]
                    row = {"world": name, **row, "speed_up": round(base / row["ms"]["total"], 3)}
                    if world.topology.pcp == 2 and context >= SPEED_UP_FROM:
                        row |= {"target_speed_up": SPEED_UP, "met": row["speed_up"] >= SPEED_UP}
                    add(row)


def print_row(row: dict[str, Any]) -> None:
    ms = "  ".join(f"{stage} {taken:.3f}" for stage, taken in row["ms"].items())
    spread = "{:.3f}..{:.3f}".format(*row["spread_ms"])
    ratios = {name: row[name] for name in ("floor_ms", "times_faster_than_peers", "speed_up", "met") if name in row}
    print(f"{row['context']:>9,}  {row['world']:25} {row['way']:10} ms: {ms} ({spread})  {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with deep_gemm/ and vllm_c.so")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens of the request")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if min(args.contexts) < NUM_NEW:
        parser.error(f"--contexts {min(args.contexts)}: a step has {NUM_NEW} query tokens, and no fewer keys")
    keep = partial(keep_part, args.out)
    _, layer = settings_of(Topology(), max(args.contexts))
    assert layer.index is not None
    launch = detect()
    if launch.world_size == 1:
        single(args.contexts, layer.index.num_heads, args.peers, keep)
        return
    open_job(launch, torch.device("cuda", launch.local_rank), 120)
    several(launch, args.contexts, layer.index.num_heads, keep)
    close_job()


if __name__ == "__main__":
    main()
