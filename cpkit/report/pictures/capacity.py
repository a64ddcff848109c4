"""Tokens of context that fit on one replica, over dcp: a line a chip."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpkit.errors import ConfigError
from cpkit.model import Model
from cpkit.report.pictures.canvas import COLOURS, DASHES, MARKERS, PAPER, sheet, shorten_axis
from cpkit.sizing.chips import Chip
from cpkit.sizing.memory.deployment import Limits, memory_of
from cpkit.sizing.memory.plan import Memory
from cpkit.sizing.rules.defaults import complete
from cpkit.sizing.rules.engines import broken_rules
from cpkit.topology import legal_dcp_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GAIN_ROOM = 34
"""Points (1/72 inch) between two chips' marks that a figure below the upper one needs."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One dcp. memory: None where nothing fits; but: why. refused: the engine's rules against it, by id."""

    dcp: int
    memory: Memory | None
    refused: tuple[str, ...]
    but: str = ""


@dataclass(frozen=True, slots=True)
class ChipFits:
    """What fits a replica of tp x pcp of one chip, by dcp in ascending order."""

    model: Model
    engine: str
    chip: Chip
    tp: int
    pcp: int
    fits: tuple[Fit, ...]


def fits(model: Model, engine: str, chip: Chip, limits: Limits, *, tp: int, pcp: int) -> ChipFits:
    """Count what fits at every legal dcp; raises ConfigError for sizes that are none."""
    complete(engine, model, chip, {"tp": tp, "pcp": pcp})
    found = []
    for dcp in legal_dcp_sizes(tp, pcp):
        deployment, _ = complete(engine, model, chip, {"tp": tp, "pcp": pcp, "dcp": dcp})
        refused = tuple(rule.id for rule in broken_rules(deployment))
        try:
            found.append(Fit(dcp, memory_of(deployment, limits), refused))
        except ConfigError as error:
            found.append(Fit(dcp, None, refused, str(error)))
    return ChipFits(model, engine, chip, tp, pcp, tuple(found))


def draw_capacity(lines: Sequence[ChipFits], path: Path | str) -> str:
    """Draw the lines; returns the picture's title. Raises ConfigError where nothing fits any chip."""
    memories = [fit.memory for line in lines for fit in line.fits if fit.memory]
    if not memories:
        names = ", ".join(line.chip.name for line in lines)
        raise ConfigError(f"nothing to draw for {names}: {lines[0].fits[0].but}")
    lead = lines[0]
    ranks = lead.tp if lead.engine == "sglang" else lead.tp * lead.pcp
    title = f"Tokens of context that fit {ranks} GPUs: {lead.model.name}, {lead.engine}, tp={lead.tp} pcp={lead.pcp}"
    weights = {f"{memory.settings.weights.kind}: {memory.settings.weights.source}" for memory in memories}
    share = memories[0].settings.utilization
    caption = (
        "Counted: caches and buffers from model and plan. Hardware file: memory of the chip. "
        f"{share.kind.capitalize()}: {share.value:.0%} of it is used. Weights {'; '.join(sorted(weights))}.",
        *_refusals(lines),
        *_without_room(lines),
    )
    with sheet(path, title, caption, width=9.5, height=5.6) as figure:
        ax = figure.subplots()
        for at, line in enumerate(lines):
            points = [(fit.dcp, fit.memory.tokens, bool(fit.refused)) for fit in line.fits if fit.memory]
            if not points:
                continue
            colour, marker = COLOURS[at], MARKERS[at]
            sizes, tokens, _ = zip(*points, strict=True)
            ax.plot(sizes, tokens, color=colour, ls=DASHES[at % 4], lw=1.6, zorder=2)
            for hollow in (False, True):
                kept = [point[:2] for point in points if point[2] is hollow]
                fill = "white" if hollow else colour
                x, y = [dcp for dcp, _ in kept], [fitting for _, fitting in kept]
                ax.plot(x, y, marker, mfc=fill, mec=colour, ms=8, mew=1.6)
            ax.plot([], [], marker=marker, ls=DASHES[at % 4], color=colour, label=line.chip.label)
        every = sorted({fit.dcp for line in lines for fit in line.fits})
        ax.set_xscale("log", base=2)
        ax.set_xticks(every, [str(size) for size in every])
        ax.minorticks_off()
        margin = (every[-1] / every[0]) ** 0.08 if len(every) > 1 else 2.0
        ax.set_xlim(every[0] / margin, every[-1] * margin)
        ax.set_xlabel("dcp (ranks that split stored keys)")
        ax.set_ylabel("tokens of context")
        ax.set_ylim(0, 1.12 * max(memory.tokens for memory in memories))
        shorten_axis(ax.yaxis)
        ax.legend(loc="best")  # lines rise from the left, or are points there
        figure.draw_without_rendering()
        _gains(ax, lines)
    return title


def _gains(ax: "Axes", lines: Sequence[ChipFits]) -> None:
    """Below a chip's points, how many times the tokens of its smallest dcp; not where the next chip's are close."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    every = [(fit.dcp, fit.memory.tokens) for line in lines for fit in line.fits if fit.memory]
    for line in lines:
        points = [(fit.dcp, fit.memory.tokens) for fit in line.fits if fit.memory]
        for dcp, tokens in points[1:]:
            below = max((other for size, other in every if size == dcp and other < tokens), default=0)
            (_, top), (_, bottom) = ax.transData.transform([(dcp, tokens), (dcp, below)])
            if top - bottom < GAIN_ROOM * figure.dpi / 72:
                continue
            text = f"{tokens / points[0][1]:.2f}x"
            ax.annotate(
                text,
                (dcp, tokens),
                xytext=(4, -14),  # beside the line that comes up from the left
                textcoords="offset points",
                ha="left",
                bbox=PAPER,
                zorder=1.5,  # under the lines
            )


def _refusals(lines: Sequence[ChipFits]) -> list[str]:
    """Why marks are hollow."""
    places = [
        (rule, line.chip.name, fit.dcp) for line in lines for fit in line.fits if fit.memory for rule in fit.refused
    ]
    told = "; ".join(f"{rule} ({where})" for rule, where in _by_reason(places).items())
    return [f"Hollow: refused by {told}."] if told else []


def _without_room(lines: Sequence[ChipFits]) -> list[str]:
    """Which points are missing, and why."""
    places = [(fit.but, line.chip.name, fit.dcp) for line in lines for fit in line.fits if fit.memory is None]
    return [f"Not drawn: {where}: {but}." for but, where in _by_reason(places).items()]


def _by_reason(places: Sequence[tuple[str, str, int]]) -> dict[str, str]:
    """Chips and their dcp for each reason.  (a, h200, 2) (a, h200, 4) (b, h100, 8): a h200 dcp 2, 4; b h100 dcp 8"""
    chips: dict[str, dict[str, list[str]]] = {}
    for reason, chip, dcp in places:
        chips.setdefault(reason, {}).setdefault(chip, []).append(f"{dcp}")
    return {
        reason: "; ".join(f"{chip} dcp {', '.join(sizes)}" for chip, sizes in found.items())
        for reason, found in chips.items()
    }
