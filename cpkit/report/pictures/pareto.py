"""The outcomes of a sweep: waits over throughput, with those that no other beats numbered and named."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpkit.report.pictures.canvas import (
    BUDGET,
    COLOURS,
    GREY,
    MARKERS,
    one_two_five,
    seconds_axis,
    sheet,
    short,
    shorten_axis,
    wait_axis,
)
from cpkit.report.pictures.labels import place_labels
from cpkit.report.pictures.sweep_file import Sweep
from cpkit.report.table import plural
from cpkit.sizing.sweep.choice import Aim, Choice, choose
from cpkit.sizing.sweep.replay import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_NAMED = 24
"""Deployments named beside the picture: the one to take, and of each number of GPUs as many."""

WIDE = 8
"""Times the least throughput from which on its axis is logarithmic."""


def draw_pareto(sweep: Sweep, aim: Aim, path: Path | str) -> str:
    """Draw both panels and the names; returns the picture's title."""
    choice = choose(sweep.outcomes, aim)
    best = list(choice.best)
    title = f"{plural(len(sweep.outcomes), 'deployment')} of a sweep, {len(best)} not beaten: {sweep.subject}"
    caption = (
        "Not beaten: no other is at least as good in all of first token p99, time per token p99, tokens/s a GPU and "
        "room for tokens. Dashed: what is asked for (--ttft, --tpot).",
        "Times and throughput are estimates: the trace replayed on the cost model's clock. Room is counted, with the "
        "chip's memory from the hardware file and weights as the sweep took them.",
    )
    named = _named(choice)
    with sheet(path, title, caption, width=13, height=max(6.0, 2.2 + 0.25 * len(named))) as figure:
        left, right, names = figure.subplots(1, 3, width_ratios=(1, 1, 0.95))
        _panel(left, choice, "first token p99", [outcome.ttft_s[1] for outcome in best], aim.ttft_s, 0)
        _panel(right, choice, "time per output token p99", [outcome.tpot_s[1] for outcome in best], aim.tpot_s, 1)
        _names(names, choice, named)
        figure.draw_without_rendering()
        for which, ax in enumerate((left, right)):
            _numbers(ax, choice, which)
    return title


def _panel(ax: "Axes", choice: Choice, name: str, waits: Sequence[float], aim: float, which: int) -> None:
    """One wait over throughput."""
    beaten = [loser.outcome for loser in choice.losers]
    ax.scatter(
        [_rate(outcome) for outcome in beaten],
        [(outcome.ttft_s, outcome.tpot_s)[which][1] for outcome in beaten],
        s=22,
        color="#BBBBBB",
        zorder=2,
    )
    gpus = _gpus(choice)
    rates = [_rate(outcome) for outcome in choice.best]
    for at, number in enumerate(gpus):
        here = [i for i, outcome in enumerate(choice.best) if outcome.candidate.gpus == number]
        x, y = [rates[i] for i in here], [waits[i] for i in here]
        ax.scatter(x, y, s=58, zorder=3, edgecolor="white", color=COLOURS[at % 8], marker=MARKERS[at % 8])
    if choice.take is not None:
        at = choice.best.index(choice.take)
        ax.scatter([rates[at]], [waits[at]], s=230, facecolor="none", edgecolor="black", lw=1.6, zorder=4)
    logarithmic = min(waits) > 0  # outputs of one token have no time between tokens, and a logarithm no 0
    if logarithmic:
        ax.set_yscale("log")
        wait_axis(ax.yaxis)
    else:
        seconds_axis(ax.yaxis)
    ax.axhline(aim, color=BUDGET, ls="--", lw=1.2)
    ax.margins(y=0.09)
    ax.set_title(name)
    ax.set_xlabel("tokens/s a GPU")
    _rate_axis(ax, [*rates, *map(_rate, beaten)])
    ax.set_ylabel("logarithmic" if logarithmic and not which else "")


def _rate_axis(ax: "Axes", rates: Sequence[float]) -> None:
    """From 0 on, or logarithmic where the rates are far apart, as those of few and many GPUs."""
    if 0 < WIDE * min(rates) < max(rates):
        ax.set_xscale("log")
        ax.margins(x=0.09)
        one_two_five(ax.xaxis)
        ax.set_xlabel(f"{ax.get_xlabel()}, logarithmic")
    else:
        ax.set_xlim(left=0)
        ax.locator_params(axis="x", nbins=6)
    shorten_axis(ax.xaxis)


def _numbers(ax: "Axes", choice: Choice, which: int) -> None:
    """The numbers of the named outcomes at their points; the axes are laid out."""
    named = _named(choice)
    labels = [(_rate(outcome), (outcome.ttft_s, outcome.tpot_s)[which][1], str(number)) for number, outcome in named]
    ringed = next((at for at, (_, outcome) in enumerate(named) if outcome is choice.take), None)
    known = {outcome.candidate for _, outcome in named}
    rest = [one for one in (*choice.best, *(loser.outcome for loser in choice.losers)) if one.candidate not in known]
    others = [(_rate(outcome), (outcome.ttft_s, outcome.tpot_s)[which][1]) for outcome in rest]
    place_labels(ax, labels, ringed=ringed, others=others)


def _rate(outcome: Outcome) -> float:
    return outcome.tokens_s_gpu


def _gpus(choice: Choice) -> list[int]:
    return sorted({outcome.candidate.gpus for outcome in choice.best})


def _named(choice: Choice) -> list[tuple[int, Outcome]]:
    """(number, outcome) of those that are numbered and named; where they are many, numbers of GPUs take turns."""
    turns: list[tuple[bool, int, int]] = []  # the one to take comes first, then the first of each number of GPUs, ..
    seen: Counter[int] = Counter()
    for at, outcome in enumerate(choice.best):
        turns.append((outcome is not choice.take, seen[outcome.candidate.gpus], at))
        seen[outcome.candidate.gpus] += 1
    kept = sorted(at for _, _, at in sorted(turns)[:MAX_NAMED])
    return [(number, choice.best[at]) for number, at in enumerate(kept, 1)]


def _names(ax: "Axes", choice: Choice, named: Sequence[tuple[int, Outcome]]) -> None:
    """The legend: numbers, deployments and their room, coloured by GPUs."""
    ax.axis("off")
    gpus = _gpus(choice)
    lines: list[tuple[str, str, str, str | None]] = [("", "not beaten (room for tokens)", "black", None)]
    for number, outcome in named:
        at = gpus.index(outcome.candidate.gpus) % 8
        take = "  take" if outcome is choice.take else ""
        text = f"{outcome.candidate.gpus} GPUs {outcome.candidate.name} ({short(outcome.capacity)}){take}"
        lines.append((str(number), text, COLOURS[at], MARKERS[at]))
    if len(choice.best) > len(named):
        lines.append(("", f"... {len(choice.best) - len(named)} more, not numbered", GREY, None))
    if choice.losers:
        lines.append(("", f"grey: {len(choice.losers)} beaten", GREY, None))
    step = 1 / max(len(lines), 16)
    for row, (label, text, colour, marker) in enumerate(lines):
        y = 1 - step * (row + 0.5)
        if marker:
            ax.plot([0.03], [y], marker, color=colour, ms=7, transform=ax.transAxes, clip_on=False)
        ax.text(0.12, y, label, transform=ax.transAxes, ha="right", va="center", fontsize=9, fontweight="bold")
        ax.text(0.15, y, text, transform=ax.transAxes, va="center", fontsize=8.5)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
