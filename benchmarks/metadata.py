"""Time the metadata kernels on a GPU beside their torch form, and write benchmarks/results/metadata.json.

    PYTHONPATH=. python benchmarks/metadata.py [--only WORD] [--out FILE]

Each case checks its results first, then is timed by CUDA-graph replay, kernel and torch form in turn: `us` is one
launch of many in a graph, `single_us` a graph of one launch, replay included; the same two of a kernel that fills one
number say what a launch costs. The floor is the case's bytes (each input read once, each output written once) at the
copy rate measured in the same run. Published peers that this machine lacks stand as recorded. With --only the file's
other rows stay, each with the day of its run.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import COPIES, Case, run_case
from benchmarks.metadata_rows import decode_builds, row_cases
from benchmarks.metadata_slots import plan_cases, plan_to_device, slot_cases
from benchmarks.timing import copy_gb_per_s, time_together, write_result


def cases() -> Iterator[Case]:
    """Every case, made when its turn comes."""
    yield from slot_cases()
    yield from plan_cases()
    yield from row_cases()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/metadata.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    gb_per_s = copy_gb_per_s()
    one = torch.zeros(1, device="cuda")
    fill = {"fill": lambda: one.fill_(1.0)}
    launch = {"us": 1e3 * time_together(fill, COPIES)["fill"], "single_us": 1e3 * time_together(fill)["fill"]}
    print(f"{torch.cuda.get_device_name()}, copy {gb_per_s:.0f} GB/s, a launch {launch}")
    rows = []
    for case in cases():
        if args.only in case.work:
            rows.append(run_case(case, gb_per_s))
            print(rows[-1], flush=True)
    if args.only in "global chunk plan to the device":
        rows += plan_to_device()
        print(*rows[-2:], sep="\n")
    if args.only in "decode-step metadata build":
        rows += decode_builds()
        print(*rows[-2:], sep="\n")
    if args.only and args.out.exists():
        rows = replaced_rows(json.loads(args.out.read_text(encoding="utf-8")), rows)
    write_result(args.out, copy_gb_per_s=round(gb_per_s), launch=launch, copies=COPIES, rows=rows)


def replaced_rows(before: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an earlier result, those that were measured again in their places, new ones at the end."""
    again = {(row["work"], row["shape"]): row for row in rows}
    kept = [{"date": before["date"], **row} for row in before["rows"]]
    merged = [again.pop((row["work"], row["shape"]), row) for row in kept]
    return [*merged, *again.values()]


if __name__ == "__main__":
    main()
