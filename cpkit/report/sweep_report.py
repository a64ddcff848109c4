"""A sweep as text: the deployments that no other beats, the one to take and why, and why the others lose.

Lines are at most LINE wide, but for tables of long names.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from cpkit.report.cost_report import duration, kinds_text
from cpkit.report.table import indent, plural, share, shorten, table
from cpkit.sizing.cost.drafts import kept_tokens
from cpkit.sizing.memory.plan import Memory
from cpkit.sizing.sweep.candidates import Refused
from cpkit.sizing.sweep.choice import Choice, Loser, differs, refused_share
from cpkit.sizing.sweep.engines import engine_flags
from cpkit.sizing.sweep.replay import SweepSetting
from cpkit.workload.request import Trace

FORMAT = "cpkit-sweep-report-1"
MAX_LOSERS = 40
LINE = 115


@dataclass(frozen=True, slots=True)
class SweepFacts:
    """What a report tells beside the choice.

    refused: candidates that were not replayed to their end. kinds: seconds of an average request in the deployment to
    take, by the kind of their source. wall_s: of the whole sweep. memory: of a rank of the deployment to take.
    """

    trace: Trace
    setting: SweepSetting
    refused: Sequence[Refused]
    kinds: Mapping[str, float]
    wall_s: float
    memory: Memory | None = None


def sweep_report(choice: Choice, facts: SweepFacts) -> str:
    """The whole report."""
    trace, setting = facts.trace, facts.setting
    replayed = len(choice.best) + len(choice.losers)
    num_gpus = sorted({outcome.candidate.gpus for outcome in (*choice.best, *(one.outcome for one in choice.losers))})
    lines = [
        f"Trace     {trace.name} ({trace.format}), {plural(len(trace.requests), 'request')}",
        *_offered(trace, num_gpus),
        f"Model     {setting.model.name} on {setting.chip}, legal for {setting.engine}; "
        f"{setting.max_model_len:,} tokens a request",
        *_drafts(setting),
        f"Sweep     {plural(replayed, 'deployment')} replayed, {len(facts.refused):,} not; {duration(facts.wall_s)}",
        *[f"Note      {note}" for note in trace.notes],
        "Note      times are the cost model's estimates; a replica is replayed with its share of the requests",
        *_sources(choice, facts.kinds),
        *_unavoidable(choice),
        "",
        *_taken(choice, setting),
        "",
        *_best(choice),
        *_losers(choice.losers),
        *_refused(facts.refused),
    ]
    return "\n".join(lines).rstrip()


def sweep_data(choice: Choice, facts: SweepFacts) -> dict[str, Any]:
    """Plain data: what `cpkit sweep --json` writes."""
    trace, setting, aim = facts.trace, facts.setting, choice.aim
    return {
        "format": FORMAT,
        "trace": {"name": trace.name, "format": trace.format, "requests": len(trace.requests)},
        "model": setting.model.name,
        "chip": setting.chip,
        "engine": setting.engine,
        "max_model_len": setting.max_model_len,
        "merge": setting.merge,
        "num_speculative_tokens": setting.budget.num_speculative_tokens,
        "acceptance_rate": setting.acceptance_rate,
        "assumptions": {name: value for name, value, _ in setting.assumptions.rows()},
        "aim": {"ttft_p99_s": aim.ttft_s, "tpot_p99_s": aim.tpot_s},
        "keeps_aim": choice.keeps_aim,
        "refused_by_all": aim.unavoidable,
        "take": None if choice.take is None else choice.take.candidate.to_json(),
        "flags": None if choice.take is None else engine_flags(choice.take.candidate, setting),
        "memory": None if facts.memory is None else facts.memory.to_json(),
        "why": list(choice.why),
        "source_seconds": dict(facts.kinds),
        "best": [outcome.to_json() for outcome in choice.best],
        "losers": [
            {**loser.outcome.to_json(), "beaten_by": loser.by.candidate.to_json(), "reason": loser.reason}
            for loser in choice.losers
        ],
        "refused": [{"candidate": one.candidate.to_json(), "reason": one.reason} for one in facts.refused],
    }


def _drafts(setting: SweepSetting) -> list[str]:
    """What decodes verify beside their own token."""
    drafts, rate = setting.budget.num_speculative_tokens, setting.acceptance_rate
    if not drafts:
        return []
    return _wrapped(
        "Drafts",
        f"{plural(drafts, 'token')} a decode, each kept with a chance of {rate:g} after those before it: "
        f"{kept_tokens(drafts, rate):.2f} tokens a step on average; of one MTP module",
    )


def _offered(trace: Trace, num_gpus: Sequence[int]) -> list[str]:
    """What comes in, which is all that deployments without a queue put out."""
    last_s = max((request.arrival_s for request in trace.requests), default=0.0)
    if not last_s or any(request.depends_on is not None for request in trace.requests):
        return []  # turns come when those before them are answered: the faster, the more
    rate = sum(request.prompt_len + request.output_len for request in trace.requests) / last_s
    shares = ", ".join(f"{rate / number:,.0f} on {number:,}" for number in num_gpus)
    told = f"; a GPU's share is {shares}" if shares else ""
    return _wrapped("Load", f"{rate:,.0f} tokens/s come in over {duration(last_s)}{told}")


def _sources(choice: Choice, kinds: Mapping[str, float]) -> list[str]:
    if choice.take is None or not kinds:
        return []
    return _wrapped("Sources", f"of an average request's seconds in {choice.take.candidate.name}: {kinds_text(kinds)}")


def _unavoidable(choice: Choice) -> list[str]:
    """Requests that no figure is of."""
    if not choice.aim.unavoidable:
        return []
    return _wrapped(
        "Refused",
        f"{share(choice.aim.unavoidable, 1.0)} of the requests by every deployment: longer than a request may be, or "
        "than its KV pool; all figures are of the others",
    )


def _wrapped(name: str, text: str) -> list[str]:
    return wrap(text, LINE, initial_indent=f"{name:10}", subsequent_indent=" " * 12, break_on_hyphens=False)


def _taken(choice: Choice, setting: SweepSetting) -> list[str]:
    if choice.take is None:
        return [f"Take      nothing: no deployment {'serves a request' if choice.best else 'was replayed'}"]
    candidate = choice.take.candidate
    of = f"{candidate.replicas} replicas of" if candidate.replicas > 1 else "one replica of"
    return [
        f"Take      {plural(candidate.gpus, 'GPU')}, {of}",
        *indent(_flag_lines(engine_flags(candidate, setting)), 12),
        *[line for reason in choice.why for line in _wrapped("", reason)],
    ]


def _flag_lines(flags: str) -> list[str]:
    """Flags as lines of a shell, each flag with its value."""
    kept = re.sub(" (?!-)", "\N{NO-BREAK SPACE}", flags)  # between a flag and its value
    lines = wrap(kept, LINE - 14, break_on_hyphens=False)
    return " \\\n".join(lines).replace("\N{NO-BREAK SPACE}", " ").splitlines()


def _best(choice: Choice) -> list[str]:
    aim = choice.aim
    if not choice.best:
        return []
    rows = [
        [
            ">" if outcome is choice.take else "+" if aim.miss(outcome) <= 1 else "",
            f"{outcome.candidate.gpus:,}",
            outcome.candidate.name,
            *[duration(value) for value in (*outcome.ttft_s, *outcome.tpot_s)],
            f"{outcome.tokens_s_gpu:,.0f}",
            _millions(outcome.capacity),
            share(outcome.kv_peak, 1.0),
            share(outcome.busy, 1.0),
        ]
        for outcome in choice.best
    ]
    header = ["", "GPUs", "deployment, batch budget", "TTFT p50", "p99", "TPOT p50", "p99"]
    header += ["tokens/s/GPU", "room", "KV peak", "busy"]
    if any(outcome.refused for outcome in choice.best):
        header.append("refused")
        rows = [[*row, share(refused_share(outcome), 1.0)] for row, outcome in zip(rows, choice.best, strict=True)]
    asked = f"{aim.ttft_s:g} s and {1e3 * aim.tpot_s:g} ms"
    return [
        f"Beaten by none in TTFT p99, TPOT p99, tokens/s/GPU and room together (> to take, + keeps {asked} too)",
        *indent(table(header, rows, "lrl" + "r" * (len(header) - 3))),
        "",
    ]


def _losers(losers: Sequence[Loser]) -> list[str]:
    if not losers:
        return []
    ordered = sorted(losers, key=lambda loser: (loser.outcome.candidate.gpus, loser.outcome.ttft_s[1]))
    rows = [
        [f"{one.outcome.candidate.gpus:,}", one.outcome.candidate.name, one.by.candidate.name, *_worse(one)]
        for one in ordered
    ]
    header = ["GPUs", "deployment", "by", "TTFT p99", "TPOT p99", "tokens/s/GPU", "room"]
    return [
        "Beaten: its figure, and that of the one that beats it (=: equal within 2%)",
        *indent(table(header, shorten(rows, MAX_LOSERS), "rll" + "r" * 4)),
        "",
    ]


def _worse(loser: Loser) -> list[str]:
    """The four figures of a loser beside its better's.  270 > 121 s"""
    one, by = loser.outcome, loser.by
    pairs = [
        (_wait_pair, one.ttft_s[1], by.ttft_s[1], ">"),
        (_wait_pair, one.tpot_s[1], by.tpot_s[1], ">"),
        (lambda value, other: (f"{value:,.0f}", f"{other:,.0f}"), one.tokens_s_gpu, by.tokens_s_gpu, "<"),
        (lambda value, other: (_millions(value), _millions(other)), one.capacity, by.capacity, "<"),
    ]
    return [f" {sign} ".join(show(own, other)) if differs(own, other) else "=" for show, own, other, sign in pairs]


def _wait_pair(seconds: float, other: float) -> tuple[str, str]:
    """Two waits, the unit at the second one where both have it."""
    own, their = duration(seconds), duration(other)
    value, _, unit = own.partition(" ")
    return (value if their.endswith(f" {unit}") else own), their


def _millions(tokens: float) -> str:
    return f"{tokens / 1e6:,.2f}M"


def _refused(refused: Sequence[Refused]) -> list[str]:
    """Reasons, each with how many share its first words and one of them."""
    if not refused:
        return []
    counts = Counter(_short(one.reason) for one in refused)
    first = {_short(one.reason): one for one in reversed(refused)}
    lines = ["Not replayed"]
    for short, number in counts.most_common():
        one = first[short]
        such = f"{plural(one.candidate.gpus, 'GPU')}, {one.candidate.name}: {one.reason}"
        text = such if number == 1 else f"such as {such}"
        lines += wrap(text, LINE, initial_indent=f"{number:>8,}  ", subsequent_indent=" " * 10, break_on_hyphens=False)
    return lines


def _short(reason: str) -> str:
    """The part of a reason that names its kind: a rule's id, or the words before the first number."""
    head = reason.partition(":")[0]
    return "".join(letter for letter in head if not letter.isdigit())[:40]
