"""The outcomes of a sweep, from the file of its results or from its report."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpkit.errors import InputError
from cpkit.report.sweep_report import FORMAT as REPORT_FORMAT
from cpkit.sizing.sweep.choice import Aim
from cpkit.sizing.sweep.replay import Outcome
from cpkit.sizing.sweep.results import FORMAT as RESULTS_FORMAT


@dataclass(frozen=True, slots=True)
class Sweep:
    """outcomes: all that were replayed. subject: model, chip and trace. aim: asked for."""

    outcomes: tuple[Outcome, ...]
    subject: str
    aim: Aim


def read_sweep(path: Path | str) -> Sweep:
    """Read either file; raises InputError for another."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        head = json.loads(text.partition("\n")[0]) if text.startswith('{"') else json.loads(text)
        found = head.get("format")
        if found == RESULTS_FORMAT:
            whole_lines = text.rpartition("\n")[0].splitlines()[1:]  # the last one may still be being written
            outcomes = [Outcome.from_json(json.loads(line)) for line in whole_lines]
            sweep = Sweep(tuple(outcomes), _subject(head["model"], head["chip"], head["trace"]), Aim())
        elif found == REPORT_FORMAT:
            sweep = _from_report(head)
        else:
            raise ValueError(f"format {found!r}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: not what `cpkit sweep --results` or `--json` writes ({error})") from error
    if not sweep.outcomes:
        raise InputError(f"{path}: no deployment was replayed in this sweep")
    if not any(outcome.finished for outcome in sweep.outcomes):
        raise InputError(f"{path}: no deployment of this sweep served a request")
    return sweep


def _from_report(data: dict[str, Any]) -> Sweep:
    losers = [
        {name: value for name, value in loser.items() if name not in ("beaten_by", "reason")}
        for loser in data["losers"]
    ]
    outcomes = tuple(Outcome.from_json(one) for one in [*data["best"], *losers])
    aim = Aim(data["aim"]["ttft_p99_s"], data["aim"]["tpot_p99_s"])
    return Sweep(outcomes, _subject(data["model"], data["chip"], data["trace"]["name"]), aim)


def _subject(model: str, chip: str, trace: str) -> str:
    return f"{model} on {chip}, {trace}"
