"""Draw who computes and who stores each token of a prefill, as an SVG.

Run: python examples/ownership_svg.py > docs/images/ownership.svg
"""

import numpy as np

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.step import StepPlan, plan_step
from cpkit.topology import Topology
from cpkit.views.materialize import stored_keys

TOKENS = 32
CELL, LEFT, TOP = 22, 150, 64
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
"""From the Okabe-Ito palette, told apart by every eye; each cell also carries its rank's number."""


def main() -> None:
    model = load_model("deepseek-v3.2")
    topology = Topology(tp=2, pcp=2, dcp=4, interleave=2)
    plan = plan_step(Batch.from_lens([TOKENS], [TOKENS]), topology, model, default_budget(model))
    print(svg(plan))


def svg(plan: StepPlan) -> str:
    """The picture of a plan of one prefill: two strips of TOKENS cells and the work of each PCP rank."""
    computed, stored, work = np.zeros(TOKENS, int), np.zeros(TOKENS, int), np.zeros(plan.topology.pcp, int)
    for rank in plan.ranks:
        positions = rank.rows.positions()
        computed[positions] = rank.pcp_rank
        work[rank.pcp_rank] = (positions + 1).sum()
        stored[stored_keys(plan, rank, ratio=1).key] = rank.dcp_rank
    width, height = LEFT + TOKENS * CELL + 20, 330
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(16, 26, f"One prefill of {TOKENS} tokens: tp=2, pcp=2, dcp=4, interleave=2", size=16, weight="bold"),
        text(LEFT, TOP - 8, "position 0"),
        text(LEFT + TOKENS * CELL, TOP - 8, f"{TOKENS - 1}", anchor="end"),
        *strip(TOP, computed, "computed by", "PCP rank"),
        *strip(TOP + 74, stored, "stored by", "DCP rank"),
        text(16, TOP + 160, "attention work", weight="bold"),
        text(16, TOP + 176, "query x key pairs"),
    ]
    for rank, pairs in enumerate(work.tolist()):
        y = TOP + 148 + rank * 28
        bar = pairs * TOKENS * CELL / work.sum()
        out.append(f'<rect x="{LEFT}" y="{y}" width="{bar:.1f}" height="22" fill="{COLOURS[rank]}"/>')
        out.append(text(LEFT + bar + 8, y + 16, f"PCP rank {rank}: {pairs}"))
    out.append(text(16, TOP + 232, "Head and tail pieces give every PCP rank the same causal work; keys are dealt"))
    out.append(text(16, TOP + 250, "out to the DCP ranks in turns of two, so no rank holds a whole context."))
    return "\n".join([*out, "</svg>"])


def strip(y: int, owners: np.ndarray, title: str, kind: str) -> list[str]:
    """One row of cells, coloured and numbered by owner."""
    out = [text(16, y + 12, title, weight="bold"), text(16, y + 28, kind)]
    for i, owner in enumerate(owners.tolist()):
        x = LEFT + i * CELL
        out.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL + 8}" rx="2" fill="{COLOURS[owner]}"/>'
            + text(x + CELL / 2 - 1, y + 20, str(owner), anchor="middle", fill="white", weight="bold")
        )
    return out


def text(
    x: float, y: float, words: str, *, size: int = 13, weight: str = "normal", anchor: str = "start", fill: str = "#222"
) -> str:
    """One line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}">'
        f"{words}</text>"
    )


if __name__ == "__main__":
    main()
