"""Who computes and who stores each position: two maps of ranks over positions.

Positions are counted in columns, of one token each in a small step and of runs of tokens in a large one. A column
never crosses from one request to the next, nor from earlier context to the tokens of this step; runs of a part are
equally long, those of different parts need not be.

    request 0: 4 computed, 6 new     request 1: 0 computed, 2 new          12 columns wanted: one token each
    0 1 2 3 | 4 5 6 7 8 9            0 1                        4 columns wanted: 0-3 | 4-6 7-9 || 0-1
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cpkit.arrays import BoolArray, FloatArray, IntArray, ceil_div
from cpkit.errors import PlanError
from cpkit.planner.interleave import local_lens
from cpkit.report.pictures.canvas import BUDGET, PALE, rank_ticks, share_colours, sheet
from cpkit.report.table import plural
from cpkit.report.words import partition_text, sizes_text
from cpkit.step import StepPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 720
MAX_REQS = 256
"""Requests drawn, the first ones."""

NEW_SHARE = 0.4
"""Least share of the width that this step's tokens have, however long the context before them."""

PART_WIDTH, MAX_WIDENED = 0.012, 40
"""Least share of the width of a part of a request, where there are not too many parts."""

NAME_WIDTH, TICK_WIDTH = 0.11, 0.075
"""Shares of the width that a request's name and a position need."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """req, start, stop: [n] int64, request of a column and its positions; is_new: [n], tokens of this step."""

    req: IntArray
    start: IntArray
    stop: IntArray
    is_new: IntArray


def cut_columns(plan: StepPlan, wanted: int = COLUMNS) -> Columns:
    """About so many columns over the step's requests, in order.

    This step's tokens have at least NEW_SHARE of them together. No part of a request is too narrow to be seen: if it
    has few tokens its columns are repeated.
    """
    parts = _parts(plan)
    amounts = [sum(stop - start for _, new, start, stop in parts if new == is_new) for is_new in (0, 1)]
    if min(amounts) and sum(amounts) > wanted:
        share = max(amounts[1] / sum(amounts), NEW_SHARE)
        scale = (wanted * (1 - share) / amounts[0], wanted * share / amounts[1])
    else:
        scale = (wanted / max(sum(amounts), 1),) * 2
    least = round(min(wanted, sum(amounts)) * PART_WIDTH) if len(parts) <= MAX_WIDENED else 1
    found: list[tuple[int, int, IntArray, IntArray]] = []
    for req, is_new, start, stop in parts:
        num = min(max(round(scale[is_new] * (stop - start)), least, 1), stop - start)
        edges = start + np.arange(num + 1) * (stop - start) // num
        times = max(-(-least // num), 1)
        found.append((req, is_new, np.repeat(edges[:-1], times), np.repeat(edges[1:], times)))
    none = np.zeros(0, np.int64)
    return Columns(
        req=np.concatenate([none, *(np.full(len(start), req) for req, _, start, _ in found)]),
        start=np.concatenate([none, *(start for _, _, start, _ in found)]),
        stop=np.concatenate([none, *(stop for _, _, _, stop in found)]),
        is_new=np.concatenate([none, *(np.full(len(start), is_new) for _, is_new, start, _ in found)]),
    )


def _parts(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """(request, 1 for this step's tokens, first position, behind the last) of earlier context and new tokens."""
    batch = plan.batch
    lens = zip(batch.num_computed[:MAX_REQS].tolist(), batch.seq_lens[:MAX_REQS].tolist(), strict=True)
    parts = []
    for req, (computed, seq_len) in enumerate(lens):
        parts += [(req, 0, 0, computed)] * (computed > 0) + [(req, 1, computed, seq_len)] * (seq_len > computed)
    return parts


def computed_share(plan: StepPlan, columns: Columns) -> FloatArray:
    """[ranks of the plan, columns], share of each column's tokens that a rank computes in this step."""
    by_place: dict[int, FloatArray] = {}
    for rank in plan.ranks:
        if rank.pcp_rank not in by_place:
            by_place[rank.pcp_rank] = _computed(plan, rank.pcp_rank, columns)
    return np.stack([by_place[rank.pcp_rank] for rank in plan.ranks])


def _computed(plan: StepPlan, pcp_rank: int, columns: Columns) -> FloatArray:
    found = np.zeros(len(columns.req), np.int64)
    segments = plan.partition.segments(pcp_rank)
    fields = (segments.req, segments.start, segments.stride, segments.count)
    bounds = np.searchsorted(columns.req, np.arange(plan.batch.num_reqs + 1))
    for req, start, stride, count in zip(*(field.tolist() for field in fields), strict=True):
        here = slice(int(bounds[req]), int(bounds[req + 1]))
        first = int(plan.batch.num_computed[req]) + start
        before = [np.clip(ceil_div(edge[here] - first, stride), 0, count) for edge in (columns.start, columns.stop)]
        found[here] += before[1] - before[0]
    share: FloatArray = found / np.maximum(columns.stop - columns.start, 1)
    return share


def stored_share(plan: StepPlan, columns: Columns) -> FloatArray:
    """[ranks of the plan, columns], share of each column's tokens whose keys a rank stores after this step."""
    topology = plan.topology
    place = np.array([[rank.dcp_rank] for rank in plan.ranks], np.int64)
    held = [local_lens(edge, place, topology.dcp, topology.interleave) for edge in (columns.start, columns.stop)]
    share: FloatArray = (held[1] - held[0]) / np.maximum(columns.stop - columns.start, 1)
    return share


def draw_ownership(plan: StepPlan, path: Path | str) -> str:
    """Draw both maps; returns the picture's title. Raises PlanError for a step without tokens."""
    batch, topology = plan.batch, plan.topology
    columns = cut_columns(plan)
    if not len(columns.req):
        raise PlanError("the step has no tokens to draw: name requests")
    shown = f" (the first {MAX_REQS} drawn)" if batch.num_reqs > MAX_REQS else ""
    title = (
        f"Who computes and who stores {plural(int(batch.seq_lens.sum()), 'token')} of "
        f"{plural(batch.num_reqs, 'request')}{shown}, {plural(len(plan.ranks), 'rank')}"
    )
    caption = (
        f"{plan.model.name}, {sizes_text(topology)}; partition {partition_text(plan.partition.strategy, topology)}, "
        f"interleave {topology.interleave}. Colour: the rank's share of the tokens in a column, white none; "
        f"a column is {_column_text(columns)}.",
        "All numbers are counted from the plan of the step. TP ranks of one PCP place compute the same tokens, "
        "each for its heads.",
    )
    height = 6.2 if len(plan.ranks) <= 64 else 9.0
    with sheet(path, title, caption, width=11.5, height=height) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True)
        _map(figure, top, computed_share(plan, columns), "Computes in this step (grey: computed before)")
        _map(figure, bottom, stored_share(plan, columns), "Stores, keys of the whole context")
        for start, stop in _runs(columns.is_new == 0):
            top.axvspan(start - 0.5, stop - 0.5, color=PALE, lw=0, zorder=0)
        axes = {top: [f"pcp {rank.pcp_rank}" for rank in plan.ranks], bottom: _dcp_places(plan)}
        for ax, places in axes.items():
            ticks = rank_ticks(len(plan.ranks))
            ax.set_yticks(ticks, [f"{plan.ranks[tick].rank}  {places[tick]}" for tick in ticks])
            ax.set_ylabel("rank")
            ax.grid(visible=False)
            ax.tick_params(length=2)
            if max(len(plan.ranks), len(columns.req) / 4) <= 16:
                _cell_borders(ax, len(plan.ranks), len(columns.req))
        _requests(plan, columns, top, bottom)
    return title


def _runs(flags: BoolArray) -> list[tuple[int, int]]:
    """Half-open runs of true flags.  1 1 0 1 -> [0, 2) [3, 4)"""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _dcp_places(plan: StepPlan) -> list[str]:
    return [f"dcp {rank.dcp_rank}" for rank in plan.ranks]


def _map(figure: "Figure", ax: "Axes", share: FloatArray, title: str) -> None:
    """One map with its scale of shares."""
    most = float(share.max(initial=0.0)) or 1.0
    image = ax.imshow(
        np.ma.masked_equal(share, 0),
        aspect="auto",
        interpolation="nearest",
        cmap=share_colours(),
        vmin=0,
        vmax=most,
        zorder=1,
    )
    ax.set_title(title)
    bar = figure.colorbar(image, ax=ax, pad=0.01, aspect=14)
    bar.set_ticks([0, most / 2, most], labels=["0", f"{50 * most:.3g}%", f"{100 * most:.3g}%"])
    bar.set_label("share of the tokens", fontsize=9)


def _cell_borders(ax: "Axes", num_ranks: int, num_columns: int) -> None:
    """Thin lines between the cells of a map that has few."""
    for row in range(1, num_ranks):
        ax.axhline(row - 0.5, color="white", lw=1.2)
    for column in range(1, num_columns):
        ax.axvline(column - 0.5, color="white", lw=0.8)


def _requests(plan: StepPlan, columns: Columns, top: "Axes", bottom: "Axes") -> None:
    """Borders between requests in both maps, positions below, and names of the requests that have room for one."""
    num = len(columns.req)
    starts = np.flatnonzero(np.diff(columns.req, prepend=-1)).tolist()
    names = []
    for start, stop in zip(starts, [*starts[1:], num], strict=True):
        for ax in (top, bottom):
            if start:
                ax.axvline(start - 0.5, color=BUDGET, lw=1.2 if len(starts) <= 40 else 0.35)
        if stop - start >= NAME_WIDTH * num:
            req = int(columns.req[start])
            kind = "prefill" if plan.batch.is_prefilling[req] else "decode"
            names.append(((start + stop - 1) / 2, f"request {plan.batch.req_ids[req]}, {kind}"))
    ticks = _position_ticks(columns, starts)
    bottom.set_xticks(ticks, [f"{columns.start[at]:,}" for at in ticks])
    bottom.xaxis.remove_overlapping_locs = False  # a name may stand below a position
    bottom.set_xticks([at for at, _ in names], [name for _, name in names], minor=True)
    bottom.tick_params(axis="x", which="minor", length=0, pad=17)
    bottom.set_xlabel(
        "position in its request (an upright line begins the next one)" if len(starts) > 1 else "position"
    )


def _position_ticks(columns: Columns, starts: list[int]) -> list[int]:
    """Columns whose first position is written: where requests begin, then in between, none nearer than TICK_WIDTH."""
    num = len(columns.req)
    gap = max(TICK_WIDTH * num, 1)
    kept: list[int] = []
    for at in [*starts, *range(0, num, max(round(gap), 1))]:
        if all(abs(at - other) >= gap for other in kept):
            kept.append(at)
    return sorted(kept)


def _column_text(columns: Columns) -> str:
    """How many tokens the columns are of."""
    sizes = columns.stop - columns.start
    least, most = (int(sizes.min()), int(sizes.max())) if len(sizes) else (1, 1)
    return "one token" if most == 1 else f"{least:,} tokens" if least == most else f"{least:,} to {most:,} tokens"
