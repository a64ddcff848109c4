"""Compare what ranks left behind: recorder logs, flight-recorder dumps, saved plans."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpkit.consistency.align import Divergence, Said, first_divergences
from cpkit.consistency.history import Entered, History
from cpkit.consistency.inputs import read_inputs
from cpkit.consistency.plans import Disagreement, agree

FORMAT = "cpkit-check-1"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job, compared. histories: by rank. calls: those compared; divergences: the earliest first."""

    name: str
    histories: dict[int, History]
    calls: int
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """What was compared and what came out.

    plans: files of saved plans, and disagreements among them. bad: what could not be compared, each with its reason;
    remarks: what was left out of files that were.
    """

    runs: tuple[Run, ...]
    plans: tuple[str, ...]
    disagreements: tuple[Disagreement, ...]
    bad: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def diverges(self) -> bool:
        """Ranks do not agree, as far as could be compared."""
        return bool(self.disagreements) or any(run.divergences for run in self.runs)


def check(paths: Sequence[Path | str]) -> Check:
    """Compare all ranks found in files and folders; raises InputError for a path that holds nothing."""
    found = read_inputs([Path(path) for path in paths])
    runs = []
    for name, histories in found.runs.items():
        divergences, calls = first_divergences(histories)
        runs.append(Run(name, dict(sorted(histories.items())), calls, tuple(divergences)))
    files = [file for file, _ in found.plans]
    disagreements = agree([plan for _, plan in found.plans], files) if files else ()
    return Check(tuple(runs), tuple(files), disagreements, (*found.bad, *found.missing()), tuple(found.remarks))


def check_data(result: Check) -> dict[str, Any]:
    """The result as plain data: what `cpkit check --json` prints."""
    return {
        "format": FORMAT,
        "diverges": result.diverges,
        "bad": list(result.bad),
        "remarks": list(result.remarks),
        "runs": [
            {
                "run": run.name,
                "files": {str(rank): history.source for rank, history in run.histories.items()},
                "calls": run.calls,
                "divergences": [_divergence_data(one) for one in run.divergences],
            }
            for run in result.runs
        ],
        "plans": {"files": list(result.plans), "disagreements": [asdict(one) for one in result.disagreements]},
    }


def _divergence_data(one: Divergence) -> dict[str, Any]:
    return {
        "group": one.stream.name,
        "ranks": list(one.stream.ranks),
        "channel": one.stream.channel,
        "call": one.call,
        "kind": one.kind,
        "odd": list(one.odd),
        "entered": [_said_data(said) for said in one.said],
        "sites_part": {"call": one.sites[0], "entered": [_said_data(said) for said in one.sites[1]]}
        if one.sites
        else None,
        "ahead": list(one.ahead),
        "behind": list(one.behind),
        "calls": {str(rank): count for rank, count in one.counts.items()},
    }


def _said_data(said: Said) -> dict[str, Any]:
    entered: Entered | None = said.entered
    if entered is None:
        return {"ranks": list(said.ranks), "op": None}
    return {
        "ranks": list(said.ranks),
        "op": entered.op,
        "dtypes": list(entered.dtypes),
        "shapes": [list(shape) for shape in entered.shapes],
        "root": entered.root if entered.root >= 0 else None,
        "site": entered.site,
        "step": entered.step,
        "state": entered.state or None,
    }
