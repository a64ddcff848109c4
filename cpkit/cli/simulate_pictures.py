"""What `cpkit simulate` draws beside its report: a timeline for Perfetto, a page for a browser."""

import argparse
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cpkit.cli.parser import int_list, whole_number
from cpkit.errors import ConfigError

if TYPE_CHECKING:  # numpy is not needed for --help
    from cpkit.settings import StepSettings
    from cpkit.simulate.result import Simulation
    from cpkit.sizing.cost.clock import PlannedClock
    from cpkit.workload.scheduler import ScheduledStep

TIMELINE_STEPS = 200


def add_picture_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags that Pictures reads."""
    group.add_argument(
        "--timeline", metavar="FILE", help="--cost: also write a Chrome trace of the ranks; Perfetto opens it"
    )
    group.add_argument(
        "--timeline-ranks",
        type=int_list,
        metavar="R,R",
        help="ranks of it (default: all of up to 16, else some of different PCP places, at most 16)",
    )
    group.add_argument(
        "--timeline-steps",
        type=whole_number,
        metavar="N",
        help=f"steps of it, the first ones (default: {TIMELINE_STEPS})",
    )
    group.add_argument("--html", metavar="FILE", help="also write the report as one page with pictures, for a browser")


class Pictures:
    """The files that the flags ask for; use it in a `with` around the replay, whose steps it is shown.

    Raises ConfigError or InputError for flags that do not go together, before any file is opened.
    """

    def __init__(self, args: argparse.Namespace, clock: "PlannedClock | None", settings: "StepSettings") -> None:
        from cpkit.report.html_levels import Levels
        from cpkit.report.timeline import Timeline, default_ranks

        self._args, self._settings = args, settings
        self._levels = Levels() if args.html is not None else None
        self._timeline: Timeline | None = None
        if args.timeline is None:
            if args.timeline_ranks is not None or args.timeline_steps is not None:
                raise ConfigError("--timeline-ranks and --timeline-steps belong to --timeline FILE: name the file")
            return
        if clock is None:
            raise ConfigError("--timeline draws the cost model's times: add --cost CHIP, like --cost h200")
        ranks = default_ranks(settings.topology) if args.timeline_ranks is None else args.timeline_ranks
        steps = TIMELINE_STEPS if args.timeline_steps is None else args.timeline_steps
        self._timeline = Timeline(args.timeline, clock, settings, ranks, steps)

    def __enter__(self) -> "Pictures":
        if self._timeline is not None:
            self._timeline.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timeline is not None:
            self._timeline.__exit__(kind, error, trace)

    def add(self, step: "ScheduledStep") -> None:
        """One more step."""
        if self._timeline is not None:
            self._timeline.add(step)
        if self._levels is not None:
            self._levels.add(step)

    def write_page(self, simulation: "Simulation", report: str, pool_note: str) -> None:
        """Write the page, where one is asked for; report: the same as text; pool_note: what its pool assumes."""
        if self._levels is None:
            return
        from cpkit.report.html import page

        Path(self._args.html).write_text(page(simulation, self._levels, report, pool_note), encoding="utf-8")

    def lines(self, simulation: "Simulation") -> list[str]:
        """What was written, for the report's end."""
        found = []
        if self._timeline is not None:
            from cpkit.report.timeline import timeline_text

            found.append(timeline_text(self._timeline, self._settings, simulation.num_steps))
        if self._levels is not None:
            found.append(f"Page      {self._args.html}: the report with pictures, for a browser")
        return ["", *found] if found else []
