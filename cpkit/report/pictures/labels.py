"""Labels beside points, moved aside until none lies on another label or on a point."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTER, LINE = 6.5, 10.0
"""Points (1/72 inch) that a letter is wide and a line is high, at the size used here."""

Box = tuple[float, float, float, float]
"""left, bottom, right, top."""


def place_labels(ax: "Axes", points: Sequence[tuple[float, float, str]], *, ringed: int | None) -> None:
    """Write each label near its point (x, y in data), with a thin line to it where it had to move away.

    ringed: the point with a ring around it, if any. The axes' limits must be final; greedy, in the order given.
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # gives the axes their place on the sheet
    per_point = figure.dpi / 72
    places = [tuple(ax.transData.transform((x, y)) / per_point) for x, y, _ in points]
    taken: list[Box] = []
    for at, (x, y) in enumerate(places):
        half = 9 if at == ringed else 4
        taken.append((x - half, y - half, x + half, y + half))
    for (x, y, text), (left, bottom) in zip(points, places, strict=True):
        offset = _free_offset(left, bottom, LETTER * len(text), taken)
        ax.annotate(
            text,
            (x, y),
            xytext=offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8.5,
            fontweight="bold",
            zorder=5,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#555555"} if math.hypot(*offset) > 14 else None,
        )


def _free_offset(x: float, y: float, width: float, taken: list[Box]) -> tuple[float, float]:
    """The nearest offset whose box is free; takes it."""
    for radius in range(10, 90, 6):
        for turn in range(12):
            angle = math.pi * turn / 6 + math.pi / 4
            dx, dy = radius * math.cos(angle), radius * math.sin(angle)
            box = (x + dx - width / 2, y + dy - LINE / 2, x + dx + width / 2, y + dy + LINE / 2)
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                return dx, dy
    return 0.0, 10.0


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
