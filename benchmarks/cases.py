"""One shape of one function to be checked and timed, and the row of results that it gives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.timing import Work, time_together

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


def run_case(case: Case, gb_per_s: float) -> dict[str, Any]:
    """Check a case, time it, and set it beside its floor, its peers and its target."""
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
