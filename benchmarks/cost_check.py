"""Hold the cost model against a GPU: time the indexer of planned steps there, and compare with what is predicted.

    PYTHONPATH=. timeout 200 python benchmarks/cost_check.py measure    on a Hopper GPU, at most 3 minutes
    PYTHONPATH=. python benchmarks/cost_check.py show                   anywhere: every table, and what is in bounds
    PYTHONPATH=. python benchmarks/cost_check.py ship                   anywhere: the grid to cpkit/data/measured
    python -m tests.sizing.pages                                        anywhere: the tables into docs/cost-model.md

`measure` (cost_measure.py) writes results/cost_check.json after every shape and begins none after --limit-s seconds;
then it shows what it found. A coarse grid becomes the tables of cpkit's kernels and predicts the planned steps; `ship`
hands it to the cost model, which reads it for `--engine cpkit`. Everything else is predicted from the shipped tables.
Collectives on two GPUs are timed by cost_links.py, the rank program's own index stage on one and on two by
indexer_step.py: both are compared where they have been run.
"""

import argparse
import csv
import gzip
import io
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import cost_links
from benchmarks.cost_measure import MODEL, measure, steps
from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.kernels import KERNELS, Kernels
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.cost.stages import RankStages
from cpkit.sizing.cost.tables import SYSTEMS, decode_blocks, tables_with_heads
from cpkit.sizing.cost.work import rank_work
from cpkit.sizing.figures import add_up
from cpkit.sizing.weights import load_weights
from cpkit.topology import Topology

RESULTS = Path(__file__).parent / "results"
RESULT, PEERS, PROGRAM = (RESULTS / f"{name}.json" for name in ("cost_check", "indexer", "indexer_step"))
SHIPPED = Path(__file__).parents[1] / "cpkit/data/measured/cpkit.csv.gz"
NO_RUN = "No run is recorded yet."
BOUND = 0.10
"""Of a step's error."""


def grid_points(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The grid with the chip's name in tables and the heads of each kernel."""
    heads = {kernel: 1 if kernel.startswith("topk") else result.get("heads") for kernel in KERNELS}
    return [{"system": SYSTEMS["h200"], "heads": heads[point["kernel"]], **point} for point in result.get("grid", [])]


def own_kernels() -> Kernels:
    """cpkit's kernels by the grid of the result."""
    return Kernels(chip("h200"), Assumptions(), tables_with_heads(grid_points(read(RESULT))))


def ship() -> None:
    """Write the grid to where the cost model reads the times of cpkit's kernels."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ("system", "kernel", "heads", "rows", "keys", "ms"), lineterminator="\n")
    writer.writeheader()
    writer.writerows(grid_points(read(RESULT)))
    SHIPPED.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read(path: Path) -> dict[str, Any]:
    """A result; {} where no run has written it."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def errors_of_steps(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, float], dict[str, float], str, float]]:
    """Planned steps: name, milliseconds measured and predicted by part, how it was read, what vendor's kernels take."""
    measured = {step["name"]: step["ms"] for step in result["steps"]}
    model = load_model(MODEL)
    weights = load_weights(MODEL, model)
    own = Kernels(chip("h200"), Assumptions(), tables_with_heads(grid_points(result)))
    vendor = Kernels(chip("h200"), Assumptions())
    for step in steps():
        if step.name not in measured:
            continue
        plan = step.plan()
        work = rank_work(plan, plan.ranks[0])
        ours, theirs = (
            RankStages(kernels, weights, plan, work).index_parts(model.layers[0]) for kernels in (own, vendor)
        )
        predicted = {part: 1e3 * figure.value for part, figure in ours.items()}
        assert predicted.keys() == measured[step.name].keys(), step.name
        yield (
            step.name,
            measured[step.name],
            predicted,
            add_up(ours.values()).words,
            1e3 * add_up(theirs.values()).value,
        )


def steps_table() -> str:
    """Planned steps: measured, predicted from the grid, predicted from the vendor's tables."""
    result = read(RESULT)
    if not result:
        return NO_RUN
    rows, within = [], 0
    for name, measured, predicted, words, theirs in errors_of_steps(result):
        ms, ours = sum(measured.values()), sum(predicted.values())
        within += abs(ours / ms - 1) <= BOUND
        parts = ", ".join(f"{part} {error(predicted[part], measured[part])}" for part in measured)
        rows.append([name, f"{ms:.3f} ms", f"{ours:.3f} ms", error(ours, ms), parts, words, f"{theirs:.3f} ms"])
    header = ["step, index stage of one layer", "measured", "predicted", "error", "by part", "read", "vendor's kernels"]
    left = f"; {len(result['left_out'])} shapes were left out for time" if result["left_out"] else ""
    return f"{markdown(header, rows)}\n\n{within} of {len(rows)} steps are within {BOUND:.0%}{left}."


PROGRAM_WORLDS = {
    "one rank": Topology(interleave=64),
    "pcp 2": Topology(pcp=2, interleave=64),
    "pcp 2, dcp 2": Topology(pcp=2, dcp=2, interleave=64),
    "tp 2, dcp 2": Topology(tp=2, dcp=2, interleave=64),
}
"""Of indexer_step.py, those that the model counts: logits written, shards gathered by collectives."""


def program_table() -> str:
    """The rank program's index stage on one GPU and on two: prefills of 8,192 tokens, stage by stage."""
    found = read(PROGRAM)
    timed = [row for part in ("one_gpu", "several_gpus") for row in found.get(part, {}).get("rows", ())]
    rows, seen = [], set()
    for row in timed:
        key = row["world"], row["context"]
        if row["way"] not in ("written", "candidates") or row["world"] not in PROGRAM_WORLDS or key in seen:
            continue
        seen.add(key)
        predicted = program_stages(PROGRAM_WORLDS[row["world"]], row["context"])
        measured = {stage: row["ms"][stage] for stage in predicted}
        parts = ", ".join(f"{stage} {error(predicted[stage], ms)}" for stage, ms in measured.items())
        ms, ours = sum(measured.values()), sum(predicted.values())
        rows.append(
            [f"{row['world']}, context {row['context']:,}", f"{ms:.3f} ms", f"{ours:.3f} ms", error(ours, ms), parts]
        )
    return markdown(["world", "measured", "predicted", "error", "by stage"], rows) if rows else NO_RUN


def program_stages(topology: Topology, context: int) -> dict[str, float]:
    """Predicted milliseconds of the program's stages, each with the collective that it waits for."""
    model = load_model(MODEL)
    settings = StepSettings(topology, model, default_budget(model, workspace_tokens=2 * context + 4096))
    plan = settings.plan(Batch.from_lens([context], [8192], [context]), 0)
    kernels = own_kernels()
    weights = load_weights(MODEL, model)
    parts = RankStages(kernels, weights, plan, rank_work(plan, plan.ranks[0])).index_parts(model.layers[0])
    collectives = CostModel(model, weights, topology, chip("h200")).step_cost(plan).layers[0].collectives
    waits = {each.collective.what: each.seconds for each in collectives}
    names = {
        "keys": ("keys", "index_keys"),
        "logits": ("logits", ""),
        "topk": ("top-k", ""),
        "exchange": ("exchange", "candidates"),
    }
    return {names[part][0]: 1e3 * (figure.value + waits.get(names[part][1], 0.0)) for part, figure in parts.items()}


def error(predicted: float, measured: float) -> str:
    """Of a prediction.  +7.4%"""
    return f"{predicted / measured - 1:+.1%}"


def peers_table() -> str:
    """The vendor's tables against the same kernels on an H200 of this project."""
    kernels = Kernels(chip("h200"), Assumptions())
    rows = []
    for row in read(PEERS)["rows"]:
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
        for engine, sizes in (("sglang", (1, 2, 4, 8)), ("vllm", (1, 8, 64))):
            for tp in sizes:
                errors = block_errors(engine, name, tp)
                spread = [f"{value:+.0%}" for value in (statistics.median(errors), min(errors), max(errors))]
                how = {"sglang": "small kernels fitted", "vllm": "fitted" if name == MODEL else "not fitted"}[engine]
                rows.append([f"{engine}, {name}, tp {tp}", str(len(errors)), *spread, how])
    return markdown(["engine, model", "points", "median error", "least", "most", "to these points"], rows)


def block_errors(engine: str, name: str, tp: int) -> list[float]:
    """Relative errors over batches of 1 to 256 and contexts of 1k to 128k."""
    model = load_model(name)
    topology = Topology(tp=tp)
    cost = CostModel(model, load_weights(name, model, weight_bits=8), topology, chip("h200"), engine=engine)
    settings = StepSettings(topology, model, default_budget(model))
    errors = []
    for (batch, context), seconds in decode_blocks(engine, name, model.num_heads // tp).items():
        if batch in (1, 8, 32, 64, 128, 256) and context in (1024, 4096, 8192, 32768, 65536, 131072):
            plan = settings.plan(Batch.from_lens([context + 1] * batch, [1] * batch), 0)
            stages = cost.step_cost(plan).layers[0].stages
            errors.append(sum(stage.seconds[0] for stage in stages if stage.name != "experts") / seconds - 1)
    return errors


def drafts_table() -> str:
    """Decodes with drafts: what a step costs more, and what it gives."""
    model, topology, acceptance = load_model(MODEL), Topology(tp=8), 0.7
    cost = CostModel(model, load_weights(MODEL, model), topology, chip("h200"))
    rows = []
    for drafts in range(4):
        settings = StepSettings(topology, model, default_budget(model, num_speculative_tokens=drafts))
        query, context = 1 + drafts, 65536
        cells = [str(drafts), f"{sum(acceptance**i for i in range(query)):.2f}"]
        for num_reqs in (1, 16, 64):
            batch = Batch.from_lens([context] * num_reqs, [query] * num_reqs, [context - query] * num_reqs)
            ms = 1e3 * cost.step_cost(settings.plan(batch, 0)).seconds()
            cells.append(f"{ms:.1f} ms, {ms / sum(acceptance**i for i in range(query)):.1f} a token")
        rows.append(cells)
    return markdown(["drafts", "tokens kept of a step", "1 request", "16 requests", "64 requests"], rows)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table of a page."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])


def links_table() -> str:
    """Collectives of planned steps on two GPUs, each size once, then the sums of the steps."""
    result = read(cost_links.RESULT)
    if not result:
        return NO_RUN
    measured = {(row["op"], row["bytes"]): row["ms"] for row in result["rows"]}
    rows = []
    for sized in cost_links.sizes():
        if (ms := measured.get(sized.key)) is not None:
            size = f"{sized.bytes / (1 << 20):,.3f} MiB"
            predicted = 1e3 * sized.seconds
            rows.append([sized.name, size, f"{ms:.4f} ms", f"{predicted:.4f} ms", error(predicted, ms), sized.kind])
    sums = []
    for name, calls in cost_links.steps():
        if all(call.key in measured for call, _ in calls):
            ms = sum(times * measured[call.key] for call, times in calls)
            predicted = sum(times * 1e3 * call.seconds for call, times in calls)
            number = sum(times for _, times in calls)
            sums.append([name, f"{number:,}", f"{ms:.2f} ms", f"{predicted:.2f} ms", error(predicted, ms)])
    each = markdown(["collective", "a rank puts in", "measured", "predicted", "error", "read"], rows)
    return f"{each}\n\n{markdown(['all of a step', 'calls', 'measured', 'predicted', 'error'], sums)}"


def assumptions_table() -> str:
    """What the model assumes, and why."""
    return markdown(["name", "value", "why"], [list(row) for row in Assumptions().rows()])


TABLES: dict[str, Callable[[], str]] = {
    "assumptions": assumptions_table,
    "steps": steps_table,
    "program": program_table,
    "peers": peers_table,
    "blocks": blocks_table,
    "drafts": drafts_table,
    "links": links_table,
}
"""Of docs/cost-model.md."""


def show(names: tuple[str, ...]) -> None:
    """Print tables."""
    for name in names:
        print(f"{name}\n\n{TABLES[name]()}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("measure", "show", "ship"))
    parser.add_argument(
        "--limit-s", type=float, default=150, help="of measuring: no shape is begun after it (default: 150)"
    )
    args = parser.parse_args()
    if args.mode == "show":
        show(tuple(TABLES))
        return 0
    if args.mode == "ship":
        ship()
        return 0
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("measure needs a Hopper GPU", file=sys.stderr)
        return 2
    from benchmarks.cost_timer import DeviceTimer
    from benchmarks.timing import write_result

    measure(DeviceTimer(), lambda result: write_result(RESULT, **result), args.limit_s)
    show(("steps",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
