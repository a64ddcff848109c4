"""Inline SVG for a page: distributions, levels over time, bars; drawn small, so that a phone shows it as it is.

Every function returns one <svg> element. Text in it is escaped; colours are told apart by every eye.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from cpkit.arrays import FloatArray
from cpkit.report.pictures.canvas import COLOURS, GREY

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 22, 36
"""Room for tick labels, and for the legend above and the axis' name below."""

ROW = 26
QUANTILES = (0.5, 0.9, 0.99)

Text = Callable[[float], str]


def svg(title: str, body: Sequence[str], height: int = HEIGHT) -> str:
    """One picture, with its title for those who hear it."""
    name = escape(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}" font-size="11"><title>{name}</title>'
        f"{''.join(body)}</svg>"
    )


def distribution(title: str, values: FloatArray, unit_text: Text) -> str:
    """Share of requests at or below a value, over values on a logarithmic axis, with p50, p90 and p99."""
    positive = np.sort(values[values > 0])
    if not len(positive):
        return svg(title, [_text(WIDTH / 2, HEIGHT / 2, "no request came so far", "middle")])
    low, high = _decades(float(positive[0]), float(positive[-1]))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - low) / (high - low)

    marks = _marks(low, high)
    body = [*_shares(), *(_tick_x(x(mark), unit_text(mark)) for mark in marks)]
    points, share = [], 0.0
    for at in np.unique(np.linspace(0, len(positive) - 1, 200).astype(np.int64)).tolist():
        across = x(float(positive[at]))
        points.append(f"{across:.1f},{_y(share):.1f}")
        share = (at + 1) / len(positive)
        points.append(f"{across:.1f},{_y(share):.1f}")
    body.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{COLOURS[0]}" stroke-width="2"/>')
    for number, quantile in enumerate(QUANTILES):
        value = float(np.quantile(values, quantile, method="lower"))
        if value > 0:
            body.append(f'<circle cx="{x(value):.1f}" cy="{_y(quantile):.1f}" r="4" fill="{COLOURS[number + 1]}"/>')
        legend = f"p{round(100 * quantile)} {unit_text(value)}"
        body.append(_legend(LEFT + number * 102, COLOURS[number + 1], legend))
    return svg(title, [*body, _text(WIDTH / 2, HEIGHT - 5, "share of requests at or below", "middle", GREY)])


def levels(title: str, lines: Sequence[tuple[str, FloatArray]], end_s: float, value_text: Text) -> str:
    """Quantities over the time of the replay, each in equal columns of it; the first one filled."""
    top = max((float(values.max(initial=0)) for _, values in lines), default=0.0) or 1.0
    most = nice(top)
    body = [_tick_y(_y(share), value_text(most * share)) for share in (0, 0.5, 1)]
    step_s = nice((end_s or 1.0) / 5)
    for tick in range(int((end_s or 1.0) / step_s) + 1):
        at_s = tick * step_s
        body.append(_tick_x(LEFT + (WIDTH - LEFT - RIGHT) * at_s / (end_s or 1.0), f"{at_s:,.6g}"))
    for number, (name, values) in enumerate(lines):
        colour, step = COLOURS[number], (WIDTH - LEFT - RIGHT) / max(len(values), 1)
        corners = []
        for at, value in enumerate(values.tolist()):
            height = _y(value / most)
            corners += [f"{LEFT + at * step:.1f},{height:.1f}", f"{LEFT + (at + 1) * step:.1f},{height:.1f}"]
        if number == 0:
            floor = [f"{LEFT + len(values) * step:.1f},{_y(0):.1f}", f"{LEFT},{_y(0):.1f}"]
            body.append(f'<polygon points="{" ".join(corners + floor)}" fill="{colour}" opacity="0.25"/>')
        body.append(f'<polyline points="{" ".join(corners)}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        body.append(_legend(LEFT + number * 130, colour, f"{name}, most {value_text(float(values.max(initial=0)))}"))
    return svg(title, [*body, _text(WIDTH / 2, HEIGHT - 5, "seconds of simulated time", "middle", GREY)])


def columns(title: str, values: Sequence[tuple[str, float]], value_text: Text, name: str) -> str:
    """A column for each name, with the mean as a line; names are written where there is room."""
    amounts = [value for _, value in values]
    most = nice(max(amounts, default=0.0) or 1.0)
    step = (WIDTH - LEFT - RIGHT) / max(len(values), 1)
    body = [_tick_y(_y(share), value_text(most * share)) for share in (0, 0.5, 1)]
    every = max(-(-len(values) * 30 // (WIDTH - LEFT - RIGHT)), 1)
    gap = 0.2 * step if len(values) <= 64 else 0.0
    for at, (label, value) in enumerate(values):
        x, y = LEFT + at * step, _y(value / most)
        body.append(
            f'<rect x="{x + gap / 2:.2f}" y="{y:.1f}" width="{step - gap:.2f}" height="{_y(0) - y:.1f}" '
            f'fill="{COLOURS[0]}"><title>{escape(label)}: {escape(value_text(value))}</title></rect>'
        )
        if at % every == 0:
            body.append(_tick_x(x + step / 2, label))
    mean = sum(amounts) / max(len(amounts), 1)
    y = _y(mean / most)
    body.append(
        f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{COLOURS[5]}" '
        'stroke-width="1.5" stroke-dasharray="5 3"/>'
    )
    body.append(_legend(LEFT, COLOURS[5], f"mean {value_text(mean)}, most {value_text(max(amounts, default=0.0))}"))
    return svg(title, [*body, _text(WIDTH / 2, HEIGHT - 5, name, "middle", GREY)])


def bars(title: str, values: Sequence[tuple[str, float, str]]) -> str:
    """A row for each (name, value, text): name and text above, the bar below."""
    most = max((value for _, value, _ in values), default=0.0) or 1.0
    body = []
    for row, (name, value, text) in enumerate(values):
        y = row * (ROW + 8)
        body += [
            _text(2, y + 12, name, "start"),
            _text(WIDTH - 2, y + 12, text, "end"),
            f'<rect x="2" y="{y + 17}" width="{max((WIDTH - 4) * value / most, 0.5):.1f}" height="9" '
            f'fill="{COLOURS[0]}"/>',
        ]
    return svg(title, body, max(len(values) * (ROW + 8), ROW))


def nice(number: float) -> float:
    """The next 1, 2 or 5 times a power of ten.  37 -> 50, 0.012 -> 0.02"""
    scale = 10.0 ** math.floor(math.log10(number))
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= number * (1 - 1e-9))


def _decades(low: float, high: float) -> tuple[float, float]:
    """The ends of a logarithmic axis, as exponents, at least a third of a decade apart."""
    first, last = math.log10(low), math.log10(high)
    room = max(0.34 - (last - first), 0.04) / 2
    return first - room, last + room


def _marks(low: float, high: float) -> list[float]:
    """Round numbers between two exponents, at most six of them."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    for steps in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps]
        inside = [value for value in found if low <= math.log10(value) <= high]
        if len(inside) <= 6:
            return inside
    return inside[:: -(-len(inside) // 6)]


def _shares() -> list[str]:
    return [_tick_y(_y(share), f"{share:.0%}") for share in (0, 0.5, 1)]


def _y(share: float) -> float:
    """Height of a share of the plot, from its floor."""
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _legend(x: float, colour: str, text: str) -> str:
    return f'<rect x="{x:.1f}" y="4" width="9" height="9" fill="{colour}"/>{_text(x + 13, 13, text, "start")}'


def _tick_x(x: float, text: str) -> str:
    return _text(x, HEIGHT - BOTTOM + 14, text, "middle")


def _tick_y(y: float, text: str) -> str:
    line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#DDD"/>'
    return line + _text(LEFT - 4, y + 4, text, "end")
