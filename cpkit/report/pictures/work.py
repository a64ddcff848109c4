"""Bars of every rank: causal work of a step and keys stored, with their mean."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cpkit.arrays import IntArray
from cpkit.report.pictures.canvas import BUDGET, COLOURS, rank_ticks, sheet, short, shorten_axis
from cpkit.report.table import plural
from cpkit.report.words import partition_text, sizes_text
from cpkit.step import StepPlan
from cpkit.views.balance import imbalance, plan_balance

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_work(plan: StepPlan, path: Path | str) -> str:
    """Draw both rows of bars; returns the picture's title."""
    balance = plan_balance([plan])
    tokens = plural(plan.batch.num_tokens, "query token")
    title = f"Work and keys of {plural(len(plan.ranks), 'rank')} in one step of {tokens}"
    topology = plan.topology
    caption = (
        f"{plan.model.name}, {sizes_text(topology)}; partition {partition_text(plan.partition.strategy, topology)}, "
        f"interleave {topology.interleave}; {plural(plan.batch.num_reqs, 'request')}. Causal work: query x key pairs "
        "before selection, over all layers; TP ranks share it by heads. Keys: of the step's requests, one for each "
        "compress ratio.",
        "All numbers are counted from the plan of the step.",
    )
    with sheet(path, title, caption, width=11.5, height=6.2) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True)
        _bars(top, balance.ranks, balance.causal_work, "Causal work", "query x key pairs")
        _bars(bottom, balance.ranks, balance.stored_keys, "Keys stored", "keys")
        bottom.set_xlabel("rank")
    return title


def _bars(ax: "Axes", ranks: IntArray, amounts: IntArray, name: str, unit: str) -> None:
    """A bar a rank, the first of the largest in another colour, and a line at the mean."""
    most, mean = int(amounts.argmax()), float(amounts.mean())
    num = len(ranks)
    even = int(amounts.min()) == int(amounts.max())
    if num <= 64:
        ax.bar(range(num), amounts, width=0.8, color=COLOURS[0])
    else:  # one outline: hundreds of bars are slow, and have seams
        ax.stairs(amounts, np.arange(num + 1) - 0.5, fill=True, color=COLOURS[0])
    if not even:
        ax.bar(most, amounts[most], width=0.8 if num <= 64 else 1.0, color=COLOURS[1])
    ax.axhline(mean, color=BUDGET, lw=1.4, ls="--")
    told = "even" if even else f"most: rank {ranks[most]}, {short(float(amounts[most]))}"
    ax.set_title(f"{name}: mean {short(mean)} (dashed), {told}; largest / mean {imbalance(amounts):.3f}")
    ax.set_ylabel(unit)
    ax.set_ylim(0, 1.08 * max(float(amounts[most]), 1.0))
    ticks = rank_ticks(num)
    ax.set_xticks(ticks, [str(ranks[tick]) for tick in ticks])
    ax.set_xlim(-0.6, num - 0.4)
    ax.grid(visible=False, axis="x")
    shorten_axis(ax.yaxis)
