"""Labels beside points, moved aside until none lies on another label or on a point."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTER, LINE = 7.0, 11.5
"""Points (1/72 inch) that a letter is wide and a line is high, at the size used here."""

Box = tuple[float, float, float, float]
"""left, bottom, right, top."""


def place_labels(
    ax: "Axes",
    points: Sequence[tuple[float, float, str]],
    *,
    ringed: int | None,
    others: Sequence[tuple[float, float]],
) -> None:
    """Write each label near its point (x, y in data), with a thin line to it where it had to move away.

    ringed: the point with a ring around it, if any. others: points without a label. The axes' limits and place must be
    final (Figure.draw_without_rendering gives them one); greedy, in the order given.
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    per_point = figure.dpi / 72
    named = [(x, y) for x, y, _ in points]
    places = [tuple(ax.transData.transform(point) / per_point) for point in (*named, *others)]
    frame = ax.get_window_extent()
    inside = (frame.x0 / per_point, frame.y0 / per_point, frame.x1 / per_point, frame.y1 / per_point)
    taken: list[Box] = []
    for at, (x, y) in enumerate(places):
        half = 9 if at == ringed else 4
        taken.append((x - half, y - half, x + half, y + half))
    for (x, y, text), (left, bottom) in zip(points, places, strict=False):
        offset = _free_offset(left, bottom, LETTER * len(text), taken, inside)
        label = ax.annotate(
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
        label.set_in_layout(False)  # or the axes would move under the labels placed before


def _free_offset(x: float, y: float, width: float, taken: list[Box], inside: Box) -> tuple[float, float]:
    """The nearest offset whose box is free, and inside the axes; takes it."""
    for radius in range(10, 130, 6):
        for turn in range(12):
            angle = math.pi * turn / 6 + math.pi / 4
            dx, dy = radius * math.cos(angle), radius * math.sin(angle)
            box = (x + dx - width / 2, y + dy - LINE / 2, x + dx + width / 2, y + dy + LINE / 2)
            within = (
                box[0] > inside[0] and box[1] > inside[1] and box[2] < inside[2] + width and box[3] < inside[3] + LINE
            )
            if within and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                return dx, dy
    return 0.0, 10.0


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
