"""Time to first token over the length of the prompt, by the cost model: a line a world.

A prompt alone on its replica is computed in steps of the batch budget. A longer prompt begins with the steps of a
shorter one, so each step is costed once:

    budget 8, prompts of 8, 20    steps [0, 8) [8, 16) and [16, 20);  time of 8 = first,  of 20 = all three
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpkit.batch import Batch
from cpkit.budget import Budget
from cpkit.model import Model
from cpkit.report.cost_report import duration, kinds_text
from cpkit.report.pictures.canvas import COLOURS, DASHES, MARKERS, sheet, token_axis, wait_axis
from cpkit.settings import StepSettings
from cpkit.sizing.chips import Chip
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.weights import ModelWeights
from cpkit.topology import Topology


@dataclass(frozen=True, slots=True)
class TtftSetting:
    """What all lines share."""

    model: Model
    weights: ModelWeights
    chip: Chip
    tp: int
    budget: Budget
    assumptions: Assumptions


@dataclass(frozen=True, slots=True)
class Curve:
    """One world: seconds at each context; kinds: of the longest, by the kind of their source."""

    topology: Topology
    contexts: tuple[int, ...]
    seconds: tuple[float, ...]
    kinds: dict[str, float]


def prefill_curve(setting: TtftSetting, contexts: Sequence[int], *, pcp: int, dcp: int) -> Curve:
    """Cost the prompts of one world; contexts: ascending, in tokens."""
    block_size = 256 if max(setting.model.slot_ratios, default=1) > 64 else 64
    topology = Topology(tp=setting.tp, pcp=pcp, dcp=dcp, block_size=block_size, interleave=block_size)
    settings = StepSettings(topology, setting.model, setting.budget)
    cost = CostModel(setting.model, setting.weights, topology, setting.chip, setting.assumptions)
    ranks = range(0, topology.replica_size, topology.tp)  # one of each PCP place: the others do the same
    known: dict[tuple[int, int], float] = {}
    kinds: defaultdict[str, float] = defaultdict(float)
    budget = setting.budget.max_num_batched_tokens

    def step_seconds(start: int, stop: int) -> float:
        if (start, stop) not in known:
            batch = Batch.from_lens([stop], [stop - start], [stop])
            step = cost.step_cost(settings.plan(batch, ranks))
            known[start, stop] = step.seconds()
            for kind, seconds in step.seconds_by_kind().items():
                kinds[kind] += seconds
        return known[start, stop]

    seconds = tuple(
        sum(step_seconds(start, min(start + budget, length)) for start in range(0, length, budget))
        for length in contexts
    )
    return Curve(topology, tuple(contexts), seconds, dict(kinds))


def draw_ttft(setting: TtftSetting, curves: Sequence[Curve], path: Path | str) -> str:
    """Draw the curves; returns the picture's title."""
    title = f"Time to first token over context: {setting.model.name} on {setting.chip.label}, tp={setting.tp}"
    kinds: defaultdict[str, float] = defaultdict(float)
    for curve in curves:
        for kind, seconds in curve.kinds.items():
            kinds[kind] += seconds
    caption = (
        f"An estimate by the cost model, its seconds from {kinds_text(kinds)}. A prompt alone on its replica, "
        f"{setting.budget.max_num_batched_tokens:,} tokens a step, overlap {setting.assumptions.overlap:g} (assumed); "
        "no queue, no cached prefix. Whether it fits memory: cpkit doctor.",
    )
    with sheet(path, title, caption, width=9.5, height=5.8) as figure:
        ax = figure.subplots()
        ordered = sorted(curves, key=lambda curve: -curve.seconds[-1])  # the legend's order is the lines'
        for at, curve in enumerate(ordered):
            topology = curve.topology
            gpus = topology.replica_size
            label = f"pcp {topology.pcp}, dcp {topology.dcp} ({gpus} GPUs): {duration(curve.seconds[-1])}"
            ax.plot(
                curve.contexts,
                curve.seconds,
                color=COLOURS[at],
                marker=MARKERS[at],
                ls=DASHES[at % 4],
                lw=1.6,
                ms=max(9 - at, 4),  # of equal times the mark drawn first is seen around the last
                label=label,
            )
        token_axis(ax, curves[0].contexts)
        ax.set_yscale("log")
        wait_axis(ax.yaxis)
        ax.set_xlabel("prompt, tokens")
        ax.set_ylabel("time to first token")
        ax.grid(visible=True, which="minor", axis="y", color="#EEEEEE", lw=0.5)
        ax.legend(loc="upper left", fontsize=9, title="world: time at the longest prompt")
    return title
