"""A sweep as text: the deployments that no other beats, the one to take and why, and why the others lose."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cpkit.report.cost_report import duration
from cpkit.report.table import indent, plural, share, shorten, table
from cpkit.sizing.sweep.candidates import Refused
from cpkit.sizing.sweep.choice import Aim, Choice
from cpkit.sizing.sweep.replay import Outcome, SweepSetting
from cpkit.workload.request import Trace

FORMAT = "cpkit-sweep-report-1"
MAX_LOSERS = 40


def sweep_report(trace: Trace, setting: SweepSetting, choice: Choice, refused: Sequence[Refused], wall_s: float) -> str:
    """The whole report; refused: candidates that were not replayed to their end."""
    replayed = len(choice.best) + len(choice.losers)
    lines = [
        f"Trace     {trace.name} ({trace.format}), {plural(len(trace.requests), 'request')}",
        f"Model     {setting.model.name} on {setting.chip}, legal for {setting.engine}; "
        f"{setting.max_model_len:,} tokens a request",
        f"Sweep     {plural(replayed, 'deployment')} replayed, {len(refused):,} not; {duration(wall_s)}",
        *[f"Note      {note}" for note in trace.notes],
        "Note      times are the cost model's estimates; a replica is replayed with its share of the requests",
        "",
        *_taken(choice),
        "",
        "Not beaten in all of first token p99, time per token p99, tokens/s a GPU and room for tokens",
        *indent(_outcomes(choice.best, choice.take)),
        "",
        *_losers(choice),
        *_refused(refused),
    ]
    return "\n".join(lines).rstrip()


def sweep_data(
    trace: Trace, setting: SweepSetting, choice: Choice, refused: Sequence[Refused], aim: Aim
) -> dict[str, Any]:
    """Plain data: what `cpkit sweep --json` writes."""
    return {
        "format": FORMAT,
        "trace": {"name": trace.name, "format": trace.format, "requests": len(trace.requests)},
        "model": setting.model.name,
        "chip": setting.chip,
        "engine": setting.engine,
        "max_model_len": setting.max_model_len,
        "merge": setting.merge,
        "assumptions": {name: value for name, value, _ in setting.assumptions.rows()},
        "aim": {"ttft_p99_s": aim.ttft_s, "tpot_p99_s": aim.tpot_s},
        "take": None if choice.take is None else choice.take.candidate.to_json(),
        "why": list(choice.why),
        "best": [outcome.to_json() for outcome in choice.best],
        "losers": [
            {**loser.outcome.to_json(), "beaten_by": loser.by.candidate.to_json(), "reason": loser.reason}
            for loser in choice.losers
        ],
        "refused": [{"candidate": one.candidate.to_json(), "reason": one.reason} for one in refused],
    }


def _taken(choice: Choice) -> list[str]:
    if choice.take is None:
        return ["Take      nothing: no deployment was replayed"]
    candidate = choice.take.candidate
    sizes = f"-tp {candidate.tp} -pcp {candidate.pcp} -dcp {candidate.dcp}"
    turns = f" --cp-kv-cache-interleave-size {candidate.interleave}" if candidate.dcp > 1 else ""
    replicas = f", {candidate.replicas} replicas" if candidate.replicas > 1 else ""
    return [
        f"Take      {plural(candidate.gpus, 'GPU')}: {sizes}{turns} --block-size {candidate.block_size} "
        f"--max-num-batched-tokens {candidate.max_num_batched_tokens}{replicas}",
        *[f"          {reason}" for reason in choice.why],
    ]


def _outcomes(outcomes: Sequence[Outcome], take: Outcome | None) -> list[str]:
    rows = [
        [
            ">" if outcome is take else "",
            f"{outcome.candidate.gpus:,}",
            outcome.candidate.name,
            *[duration(value) for value in (*outcome.ttft_s, *outcome.tpot_s)],
            f"{outcome.tokens_s_gpu:,.0f}",
            f"{outcome.capacity / 1e6:,.2f}M",
            share(outcome.kv_peak, 1.0),
            share(outcome.busy, 1.0),
        ]
        for outcome in outcomes
    ]
    header = ["", "GPUs", "deployment, batch budget", "TTFT p50", "p99", "TPOT p50", "p99"]
    header += ["tokens/s/GPU", "room", "KV peak", "busy"]
    return table(header, rows, "lrl" + "r" * 8)


def _losers(choice: Choice) -> list[str]:
    if not choice.losers:
        return []
    rows = [
        [
            f"{loser.outcome.candidate.gpus:,}",
            loser.outcome.candidate.name,
            f"{loser.by.candidate.name}: {loser.reason}",
        ]
        for loser in choice.losers
    ]
    header = ["GPUs", "deployment", "is beaten by"]
    return ["Beaten", *indent(table(header, shorten(rows, MAX_LOSERS), "rll")), ""]


def _refused(refused: Sequence[Refused]) -> list[str]:
    """Reasons, each with how many share its first words and one of them."""
    if not refused:
        return []
    counts = Counter(_short(one.reason) for one in refused)
    first = {_short(one.reason): one for one in reversed(refused)}
    rows = [
        [f"{number:,}", f"{first[short].candidate.gpus:,} GPUs, {first[short].candidate.name}", first[short].reason]
        for short, number in counts.most_common()
    ]
    return ["Not replayed", *indent(table(["", "such as", "because"], rows, "rll"))]


def _short(reason: str) -> str:
    """The part of a reason that names its kind: a rule's id, or the words before the first number."""
    head = reason.partition(":")[0]
    return "".join(letter for letter in head if not letter.isdigit())[:40]
