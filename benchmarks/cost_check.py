"""Hold the cost model against a GPU: time the indexer of planned steps there, and compare with what is predicted.

    PYTHONPATH=. python benchmarks/cost_check.py measure     on a Hopper GPU, a minute: results/cost_check.json
    PYTHONPATH=. python benchmarks/cost_check.py docs        anywhere: the tables of docs/cost-model.md

`measure` times two sets of shapes. A coarse grid of (rows, keys) becomes the tables of cpkit's kernels. The steps are
planned like those of a replay, for one rank of one or two, and run as their plan says, run by run of each chunk, at
shapes that lie between the grid's. `docs` predicts them from the grid, and everything else from the shipped tables.
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import cost_links
from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.kernels import Kernels
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.cost.stages import RankStages
from cpkit.sizing.cost.tables import Curve, KernelTable, decode_blocks
from cpkit.sizing.cost.work import rank_work
from cpkit.sizing.weights import load_weights
from cpkit.step import StepPlan
from cpkit.topology import Topology

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "cost_check.json"
PEERS = ROOT / "benchmarks" / "results" / "indexer.json"
PAGE = ROOT / "docs" / "cost-model.md"

MODEL = "deepseek-v3.2"
HEADS, TOPK = 64, 2048
PREFILL_ROWS = (64, 256, 1024, 4096, 8192)
PREFILL_KEYS = (4096, 8192, 16384, 65536, 262144, 524288)
DECODE_ROWS = (1, 4, 16, 64, 128)
DECODE_KEYS = (4096, 16384, 65536, 262144, 524288)
MOST_LOGITS = 1 << 31
"""fp32 logits that a shape of the grid may write: 8 GiB."""

PREFILLS = (8192, 32768, 131072, 524288)
"""Contexts whose last 8,192 tokens are prefilled in a step."""
DECODES = ((16, 32768), (64, 32768), (100, 50000), (16, 131072), (24, 100000), (8, 524288))
"""Requests of a decode step, and the context of each."""


def steps() -> Iterator[tuple[str, Batch, Topology]]:
    """Steps to check: name, batch and world; rank 0 is run."""
    for context in PREFILLS:
        batch = Batch.from_lens([context], [8192], [context])
        yield f"prefill of 8,192 tokens, context {context:,}", batch, Topology()
        yield f"the same, one rank of pcp 2, context {context:,}", batch, Topology(pcp=2)
    for num_reqs, context in DECODES:
        batch = Batch.from_lens([context] * num_reqs, [1] * num_reqs, [context - 1] * num_reqs)
        yield f"{num_reqs} decodes, context {context:,}", batch, Topology()
    mixed = Batch.from_lens([4096 * (1 + i % 32) for i in range(64)], [1] * 64)
    yield "64 decodes, contexts 4,096 to 131,072", mixed, Topology()


def planned(batch: Batch, topology: Topology) -> StepPlan:
    """The plan of rank 0, with the workspace that such contexts need."""
    model = load_model(MODEL)
    budget = default_budget(model, workspace_tokens=1 << 22)
    return StepSettings(topology, model, budget).plan(batch, 0)


# ---- on the GPU ----------------------------------------------------------------------------------------------------


def measure() -> None:
    from benchmarks.timing import copy_gb_per_s, write_result

    grid = [point for points in (prefill_grid(), decode_grid()) for point in points]
    found = [{"name": name, **time_step(planned(batch, topology))} for name, batch, topology in steps()]
    write_result(RESULT, copy_gb_per_s=copy_gb_per_s(), heads=HEADS, topk=TOPK, grid=grid, steps=found)
    print(f"{len(grid)} points of the grid and {len(found)} steps in {RESULT}")


def prefill_grid() -> Iterator[dict[str, Any]]:
    """Times of logits and of top-k of the last rows of one request."""
    for keys in PREFILL_KEYS:
        for rows in PREFILL_ROWS:
            if rows > keys or rows * keys > MOST_LOGITS:
                continue
            ms = time_rows([(keys - rows, rows)], keys, rows)
            mean = keys - (rows - 1) / 2
            yield {"kernel": "mqa_logits", "rows": rows, "keys": mean, "ms": ms["logits"]}
            yield {"kernel": "topk_2048", "rows": rows, "keys": mean, "ms": ms["topk"]}


def decode_grid() -> Iterator[dict[str, Any]]:
    """Times of logits and of top-k of one token of each of several requests."""
    for keys in DECODE_KEYS:
        for rows in DECODE_ROWS:
            if rows * keys > 1 << 24:
                continue
            ms = time_decodes([keys] * rows)
            yield {"kernel": "mqa_logits_decode", "rows": rows, "keys": keys, "ms": ms["logits"]}
            yield {"kernel": "topk_2048_decode", "rows": rows, "keys": keys, "ms": ms["topk"]}


def time_step(plan: StepPlan) -> dict[str, Any]:
    """Milliseconds of a planned step's logits and top-k on its rank."""
    rows = plan.ranks[0].rows
    if rows.num_decodes:
        return {"ms": time_decodes(rows.seq_lens[: rows.num_decodes].tolist())}
    total: defaultdict[str, float] = defaultdict(float)
    for chunk in plan.ranks[0].chunks[1]:
        parts = range(rows.num_decodes + chunk.row_start, rows.num_decodes + chunk.row_stop)
        runs = [(int(rows.start_pos[part]), int(rows.num_tokens[part])) for part in parts]
        # under PCP alone a row is scored against its own request's keys up to its end
        for name, ms in time_rows(runs, chunk.num_keys, chunk.run).items():
            total[name] += ms
    return {"ms": dict(total)}


def time_rows(parts: list[tuple[int, int]], num_keys: int, run: int) -> dict[str, float]:
    """Prefill tokens (first position, count) of one chunk, scored in runs: milliseconds of logits and of top-k.

    Each part sees keys of its own, laid one after another in the workspace.
    """
    import torch

    from benchmarks.timing import time_together
    from cpkit.kernels.mqa_logits import mqa_logits
    from cpkit.kernels.topk import topk

    start, end, first = [], [], 0
    for position, count in parts:
        start.append(torch.full((count,), first, dtype=torch.int32, device="cuda"))
        end.append(first + position + 1 + torch.arange(count, dtype=torch.int32, device="cuda"))
        first += position + count
    assert first == num_keys, (parts, num_keys)
    key_start, key_end = torch.cat(start), torch.cat(end)
    tokens = len(key_end)
    q = torch.randn(tokens, HEADS, 128, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(num_keys, 128, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(num_keys, device="cuda") + 0.5
    weights = torch.randn(tokens, HEADS, device="cuda")
    bounds = [(first, min(first + run, tokens)) for first in range(0, tokens, run)]
    logits = torch.empty(min(run, tokens), num_keys, device="cuda")
    chosen = torch.empty(tokens, TOPK, dtype=torch.int32, device="cuda")

    def score() -> None:
        for a, b in bounds:
            mqa_logits(q[a:b], k, scale, weights[a:b], key_start[a:b], key_end[a:b], out=logits[: b - a])

    def select() -> None:
        for a, b in bounds:
            topk(logits[: b - a], key_start[a:b], key_end[a:b], TOPK, out=chosen[a:b])

    score()
    return time_together({"logits": score, "topk": select})


def time_decodes(lens: list[int]) -> dict[str, float]:
    """One token of each request over its pages: milliseconds of logits and of top-k."""
    import torch

    from benchmarks.decode_logits import make
    from benchmarks.timing import time_together
    from cpkit.kernels.paged_mqa_logits import paged_mqa_logits
    from cpkit.kernels.topk import topk

    data = make(1, HEADS, [-(-n // 64) * 64 for n in lens])
    logits = torch.empty(len(lens), data["max_keys"], device="cuda")
    key_end = torch.tensor(lens, dtype=torch.int32, device="cuda")
    key_start = torch.zeros_like(key_end)
    chosen = torch.empty(len(lens), TOPK, dtype=torch.int32, device="cuda")

    def score() -> None:
        paged_mqa_logits(**data, out=logits)

    def select() -> None:
        topk(logits, key_start, key_end, TOPK, out=chosen)

    score()
    return time_together({"logits": score, "topk": select})


# ---- anywhere ------------------------------------------------------------------------------------------------------


def own_tables(grid: list[dict[str, Any]]) -> dict[str, tuple[KernelTable, int]]:
    """The grid as tables of cpkit's kernels."""
    points: dict[str, dict[float, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for point in grid:
        points[point["kernel"]][point["rows"]].append((point["keys"], 1e-3 * point["ms"]))
    tables = {}
    for kernel, by_rows in points.items():
        rows = tuple(sorted(by_rows))
        curves = tuple(Curve(*zip(*sorted(by_rows[number]), strict=True)) for number in rows)
        tables[kernel] = KernelTable(rows, curves), 1 if kernel.startswith("topk") else HEADS
    return tables


def steps_table() -> str:
    """Planned steps: measured, predicted from the grid, predicted from the vendor's tables."""
    if not RESULT.exists():
        return "No run is recorded yet."
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    measured = {step["name"]: sum(step["ms"].values()) for step in result["steps"]}
    model = load_model(MODEL)
    weights = load_weights(MODEL, model)
    own = Kernels(chip("h200"), Assumptions(), own_tables(result["grid"]))
    vendor = Kernels(chip("h200"), Assumptions())
    rows = []
    for name, batch, topology in steps():
        plan = planned(batch, topology)
        work = rank_work(plan, plan.ranks[0])
        ours, theirs = (RankStages(kernels, weights, plan, work).select(model.layers[0]) for kernels in (own, vendor))
        ms = measured[name]
        rows.append(
            [name, f"{ms:.3f} ms", f"{1e3 * ours.value:.3f} ms", f"{1e3 * ours.value / ms - 1:+.1%}", ours.kind,
             f"{1e3 * theirs.value:.3f} ms"]
        )  # fmt: skip
    header = ["step, index stage of one layer", "measured", "predicted", "error", "read", "vendor's kernels"]
    return markdown(header, rows)


def peers_table() -> str:
    """The vendor's tables against the same kernels on an H200 of this project."""
    kernels = Kernels(chip("h200"), Assumptions())
    rows = []
    for row in json.loads(PEERS.read_text(encoding="utf-8"))["rows"]:
        if row["work"] not in ("mqa_logits", "topk") or "peer" not in row["ms"]:
            continue
        keys = row["N"] - (row["M"] - 1) / 2
        if row["work"] == "mqa_logits":
            what, figure = f"{row['H']} heads", kernels.seconds("mqa_logits", row["M"], keys, row["H"])
        else:
            what, figure = f"k {row['k']:,}", kernels.topk_seconds(row["k"], row["M"], keys)
        peer = row["ms"]["peer"]
        rows.append(
            [row["work"], f"{row['M']:,} x {row['N']:,}, {what}", f"{peer:.3f} ms", f"{1e3 * figure.value:.3f} ms",
             f"{1e3 * figure.value / peer - 1:+.1%}", figure.kind]
        )  # fmt: skip
    return markdown(["kernel", "rows x keys", "measured", "predicted", "error", "read"], rows)


def blocks_table() -> str:
    """The attention block of a decode step against engines."""
    rows = []
    for name in ("deepseek-v3.2", "glm-5"):
        for engine, sizes in (("sglang", (1, 2, 4, 8)), ("vllm", (1, 8))):
            for tp in sizes:
                errors = block_errors(engine, name, tp)
                spread = [f"{value:+.0%}" for value in (statistics.median(errors), min(errors), max(errors))]
                rows.append([f"{engine}, {name}, tp {tp}", str(len(errors)), *spread])
    return markdown(["engine, model", "points", "median error", "least", "most"], rows)


def block_errors(engine: str, name: str, tp: int) -> list[float]:
    """Relative errors over batches of 1 to 128 and contexts of 1k to 128k."""
    model = load_model(name)
    topology = Topology(tp=tp)
    cost = CostModel(model, load_weights(name, model, weight_bits=8), topology, chip("h200"))
    settings = StepSettings(topology, model, default_budget(model))
    errors = []
    for (batch, context), seconds in decode_blocks(engine, name, model.num_heads // tp).items():
        if batch in (1, 8, 32, 64, 128) and context in (1024, 4096, 8192, 32768, 65536, 131072):
            plan = settings.plan(Batch.from_lens([context + 1] * batch, [1] * batch), 0)
            stages = cost.step_cost(plan).layers[0].stages
            errors.append(sum(stage.seconds[0] for stage in stages if stage.name != "experts") / seconds - 1)
    return errors


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])


def links_table() -> str:
    """Collectives of planned steps on two GPUs."""
    if not cost_links.RESULT.exists():
        return "No run is recorded yet."
    result = json.loads(cost_links.RESULT.read_text(encoding="utf-8"))
    measured = {row["what"]: row["ms"] for row in result["rows"]}
    rows = []
    for what, collective, seconds, kind in cost_links.step_collectives():
        ms = measured[what]
        size = f"{collective.bytes / collective.times / (1 << 20):,.2f} MiB"
        error = f"{1e3 * seconds / ms - 1:+.1%}"
        rows.append([f"{collective.op}: {what}", size, f"{ms:.4f} ms", f"{1e3 * seconds:.4f} ms", error, kind])
    return markdown(["collective", "a rank puts in", "measured", "predicted", "error", "read"], rows)


def assumptions_table() -> str:
    return markdown(["name", "value", "why"], [list(row) for row in Assumptions().rows()])


TABLES: dict[str, Callable[[], str]] = {
    "assumptions": assumptions_table,
    "steps": steps_table,
    "peers": peers_table,
    "blocks": blocks_table,
    "links": links_table,
}
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def write_docs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    made = BLOCK.sub(lambda it: f"{it[1]}{TABLES[it[2]]()}\n{it[4]}" if it[2] in TABLES else it[0], text)
    PAGE.write_text(made, encoding="utf-8")
    for name, table in TABLES.items():
        print(f"{name}\n{table()}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("measure", "docs"))
    if parser.parse_args().mode == "docs":
        write_docs()
        return 0
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("measure needs a Hopper GPU", file=sys.stderr)
        return 2
    measure()
    return 0


if __name__ == "__main__":
    sys.exit(main())
