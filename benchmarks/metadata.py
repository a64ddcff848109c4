"""Time the metadata kernels on a GPU beside their torch form, and write benchmarks/results/metadata.json.

    PYTHONPATH=. python benchmarks/metadata.py [--only WORD] [--out FILE]

Each case checks its results first, then is timed by CUDA-graph replay, kernel and torch form in turn: `us` is one
launch of many in a graph, `single_us` a graph of one launch, replay included. The floor is the case's bytes (each input
read once, each output written once) at the copy rate measured in the same run. Published peers that this machine lacks
stand as recorded.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Work, copy_gb_per_s, time_together, write_result

COPIES = 50


@dataclass
class Case:
    """One shape of one function.

    works: what is timed, "cpkit" and whatever stands beside it. num_bytes: for the floor. check: raises where the
    kernel's result is wrong. recorded_us: of a peer on the same chip, with its name. target_us: what was aimed at.
    """

    work: str
    shape: str
    works: dict[str, Work]
    num_bytes: int
    check: Callable[[], None]
    recorded_us: dict[str, float] = field(default_factory=dict)
    target_us: float | None = None


def cases() -> Iterator[Case]:
    """Every case, made when its turn comes."""
    yield from ()


def run(case: Case, gb_per_s: float) -> dict[str, Any]:
    for work in case.works.values():
        work()
    case.check()
    many, one = time_together(case.works, COPIES), time_together(case.works)
    row: dict[str, Any] = {"work": case.work, "shape": case.shape}
    row["us"] = {name: round(1e3 * ms, 2) for name, ms in many.items()}
    row["single_us"] = {name: round(1e3 * ms, 1) for name, ms in one.items()}
    row["floor_us"] = round(case.num_bytes / gb_per_s / 1e3, 3)
    row["recorded_us"] = case.recorded_us
    others = {**case.recorded_us, **{name: us for name, us in row["us"].items() if name != "cpkit"}}
    row["times_faster_than"] = {name: round(us / row["us"]["cpkit"], 1) for name, us in others.items()}
    if case.target_us is not None:
        row["target_us"], row["met"] = case.target_us, row["us"]["cpkit"] <= case.target_us
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/metadata.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    gb_per_s = copy_gb_per_s()
    print(f"{torch.cuda.get_device_name()}, copy {gb_per_s:.0f} GB/s")
    rows = []
    for case in cases():
        if args.only in case.work:
            rows.append(run(case, gb_per_s))
            print(rows[-1], flush=True)
    write_result(args.out, copy_gb_per_s=round(gb_per_s), copies=COPIES, rows=rows)


if __name__ == "__main__":
    main()
