"""The prefill chunks of one rank beside their budgets: tokens gathered at once, logits of the largest run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpkit.errors import PlanError
from cpkit.planner.chunks import Chunk
from cpkit.report.pictures.canvas import BUDGET, COLOURS, PAPER, sheet, short, shorten_axis
from cpkit.report.table import plural, share
from cpkit.report.words import sizes_text
from cpkit.step import RankPlan, StepPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 1 << 20
MAX_NUMBERED = 24
"""Chunks up to which each bar carries its number and its runs."""


def draw_chunks(plan: StepPlan, rank: RankPlan, path: Path | str) -> str:
    """Draw the chunks of a rank, a row of two panels for each compress ratio; returns the picture's title.

    Raises PlanError where the step has no prefill keys to chunk.
    """
    found = {ratio: chunks for ratio, chunks in rank.chunks.items() if chunks}
    if not found:
        raise PlanError(f"rank {rank.rank} has no prefill chunk to draw: the step has no prefill rows with keys")
    num_chunks = sum(map(len, found.values()))
    title = f"Prefill chunks of rank {rank.rank} against their budgets: {plural(num_chunks, 'chunk')}"
    topology = plan.topology
    same = topology.dcp > 1 or topology.pcp == 1
    caption = (
        f"{plan.model.name}, {sizes_text(topology)}; {'all ranks have' if same else 'every PCP rank cuts'} "
        f"{'the same chunks' if same else 'its own chunks'}. Rows whose keys fit together share a chunk; a row that "
        "breaks a budget alone is cut into spans of keys and runs of queries.",
        "Chunks are counted from the plan of the step; budgets are given (--workspace-tokens, --logits-mb).",
    )
    with sheet(path, title, caption, width=11.5, height=1.6 + 2.7 * len(found)) as figure:
        rows = figure.subplots(len(found), 2, squeeze=False)
        for (ratio, chunks), (left, right) in zip(found.items(), rows, strict=True):
            keys = "a key a token" if ratio == 1 else f"a key for {ratio} tokens"
            gathered = [chunk.num_keys * ratio for chunk in chunks]
            _bars(left, gathered, plan.budget.workspace_tokens, f"Workspace, {keys}", "tokens gathered")
            logits = [4 * chunk.peak_logits / MIB for chunk in chunks]
            _bars(right, logits, plan.budget.logits_bytes / MIB, f"Logits of the largest run, {keys}", "MiB of fp32")
            _numbers(left, gathered, [short(tokens) for tokens in gathered])
            _numbers(right, logits, [_runs_text(chunk, len(chunks)) for chunk in chunks])
    return title


def _bars(ax: "Axes", values: Sequence[float], budget: float, title: str, unit: str) -> None:
    """A bar a chunk under the line of its budget."""
    few = len(values) <= 60
    ax.bar(range(len(values)), values, width=0.8 if few else 1.0, color=COLOURS[0])
    ax.axhline(budget, color=BUDGET, lw=1.6)
    ax.set_ylim(0, 1.22 * budget)
    ax.text(
        0.995,
        budget * 1.03,
        f"budget {short(budget)}; fullest chunk {share(max(values), budget)}",
        transform=ax.get_yaxis_transform(),
        ha="right",
        va="bottom",
        fontsize=9,
        color=BUDGET,
        bbox=PAPER,
    )
    ax.set_title(title)
    ax.set_ylabel(unit)
    ax.set_xlabel("chunk, in order")
    if len(values) <= MAX_NUMBERED:
        ax.set_xticks(range(len(values)))
    middle, half = (len(values) - 1) / 2, max(len(values), 4) / 2 + 0.1  # one bar alone is no wall
    ax.set_xlim(middle - half, middle + half)
    ax.grid(visible=False, axis="x")
    shorten_axis(ax.yaxis)


def _runs_text(chunk: Chunk, num_chunks: int) -> str:
    """In how many runs of queries a chunk is scored; short where bars are narrow."""
    return plural(chunk.num_runs, "run") if num_chunks <= 8 else f"{chunk.num_runs}x"


def _numbers(ax: "Axes", heights: Sequence[float], texts: Sequence[str]) -> None:
    """A text at the top of each bar, where there are few."""
    if len(heights) > MAX_NUMBERED:
        return
    for at, (height, text) in enumerate(zip(heights, texts, strict=True)):
        inside = height > 0.75 * ax.get_ylim()[1] / 1.22
        ax.annotate(
            text,
            (at, height),
            xytext=(0, -3 if inside else 2),
            textcoords="offset points",
            ha="center",
            va="top" if inside else "bottom",
            fontsize=8 if len(heights) <= 12 else 7,
            color="white" if inside else "black",
            bbox=None if inside else PAPER,
        )
