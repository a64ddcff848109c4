"""Bytes of a step's collectives, largest first: what one rank puts in, over all layers."""

import math
from collections import defaultdict
from pathlib import Path

from cpkit.errors import PlanError
from cpkit.report.pictures.canvas import COLOURS, PAPER, sheet
from cpkit.report.table import plural, size
from cpkit.report.words import merge_text, sizes_text, stages_text
from cpkit.step import StepPlan
from cpkit.views.traffic import Traffic

GROUPS = {"pcp": COLOURS[0], "dcp": COLOURS[1], "tp": COLOURS[2]}


def collectives_by_name(plan: StepPlan) -> list[tuple[str, str, str, Traffic]]:
    """(what travels, operation, group, calls and bytes over all layers), most bytes first."""
    calls: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    sizes: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for one, num_layers in plan.collectives.weighted(plan.model):
        kind = one.what, one.op, one.group
        calls[kind] += one.times * num_layers
        sizes[kind] += one.bytes * num_layers
    return sorted(((*kind, Traffic(calls[kind], sizes[kind])) for kind in calls), key=lambda row: (-row[3].bytes, row))


def draw_traffic(plan: StepPlan, path: Path | str) -> str:
    """Draw the bars; returns the picture's title. Raises PlanError for a world without collectives."""
    rows = collectives_by_name(plan)
    if not rows:
        raise PlanError("this world has no collectives to draw: pcp and dcp are 1")
    total = sum(row[3].bytes for row in rows)
    title = f"Bytes of one step's collectives: {size(total)} from one rank{stages_text(plan.topology)}"
    caption = (
        f"{plan.model.name}, {sizes_text(plan.topology)}, merge {merge_text(plan.merge, plan.topology)}; "
        f"{plural(plan.batch.num_tokens, 'query token')} of {plural(plan.batch.num_reqs, 'request')}, all layers. "
        "Collectives of projections and experts are the engine's and not counted.",
        "All numbers are counted from the plan of the step; a rank of the group puts in so much, and receives what "
        "the operation gives.",
    )
    from matplotlib.ticker import MultipleLocator

    with sheet(path, title, caption, width=11.5, height=1.8 + 0.42 * len(rows)) as figure:
        ax = figure.subplots()
        at = range(len(rows))
        ax.barh(at, [row[3].bytes for row in rows], color=[GROUPS[row[2]] for row in rows], height=0.7)
        ax.set_yticks(at, [f"{what}\n{op} over {group}" for what, op, group, _ in rows], fontsize=8.5)
        ax.invert_yaxis()
        for row, (_, _, _, traffic) in zip(at, rows, strict=True):
            text = f"{size(traffic.bytes)} in {plural(traffic.calls, 'call')}"
            ax.annotate(
                text,
                (traffic.bytes, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                bbox=PAPER,
            )
        ax.set_xlim(0, 1.25 * max(rows[0][3].bytes, 1))
        ax.set_xlabel("bytes that one rank puts in")
        step = 2.0 ** math.ceil(math.log2(max(rows[0][3].bytes, 5) / 5))  # ticks at round binary sizes
        ax.xaxis.set_major_locator(MultipleLocator(step))
        ax.xaxis.set_major_formatter(lambda value, _: size(value))
        ax.grid(visible=False, axis="y")
        used = [group for group in GROUPS if any(row[2] == group for row in rows)]
        handles = [ax.barh(0, 0, color=GROUPS[group]) for group in used]
        ax.legend(handles, [f"over {group}" for group in used], loc="lower right")
    return title
