"""Owner strips: one letter a token, so that a small step can be read off by eye.

request 1, prefill    0         10
  computed by         ..0001111110
  stored by           012301230123
"""

from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase, digits

from cpkit.planner.interleave import split_position
from cpkit.planner.partition import REPLICATED
from cpkit.report.table import indent
from cpkit.step import StepPlan

LETTERS = digits + ascii_lowercase + ascii_uppercase
"""Owners 0..61; a strip of more owners is not drawn."""

EVERY, BEFORE = "*", "."

MAX_TOKENS, MAX_REQS = 640, 12
LINE = 80


def fits_strip(plan: StepPlan) -> bool:
    """The step is small enough to draw each of its tokens."""
    batch, topology = plan.batch, plan.topology
    few = batch.num_reqs <= MAX_REQS and int(batch.seq_lens.sum()) <= MAX_TOKENS
    return few and max(topology.pcp, topology.dcp) <= len(LETTERS)


def strips(plan: StepPlan) -> list[str]:
    """Both strips of every request of the batch, under a ruler of positions."""
    lines: list[str] = []
    computed, stored = computed_by(plan), stored_by(plan)
    for i, (req_id, prefilling) in enumerate(
        zip(plan.batch.req_ids.tolist(), plan.batch.is_prefilling.tolist(), strict=True)
    ):
        title = f"request {req_id}, {'prefill' if prefilling else 'decode'}"
        for start in range(0, max(len(stored[i]), 1), LINE):
            cut = slice(start, start + LINE)
            lines += [
                f"{title if start == 0 else '':<22}{ruler(start, len(stored[i][cut]))}",
                f"{'  computed by':<22}{computed[i][cut]}",
                f"{'  stored by':<22}{stored[i][cut]}",
            ]
    return indent(lines)


def computed_by(plan: StepPlan) -> list[str]:
    """For each request a letter a position: the PCP rank that computes it in this step, * for all, . for before."""
    batch, queries = plan.batch, plan.partition
    owners = [[BEFORE] * n for n in batch.seq_lens.tolist()]
    for pcp_rank in range(queries.pcp_size):
        segments = queries.segments(pcp_rank)
        fields = (segments.req, segments.start, segments.stride, segments.count)
        for req, start, stride, tokens in zip(*(field.tolist() for field in fields), strict=True):
            shared = queries.mode[req] == REPLICATED and queries.pcp_size > 1
            letter = EVERY if shared else LETTERS[pcp_rank]
            first = int(batch.num_computed[req]) + start
            for pos in range(first, first + tokens * stride, stride):
                owners[req][pos] = letter
    return ["".join(row) for row in owners]


def stored_by(plan: StepPlan) -> list[str]:
    """For each request a letter a position: the DCP rank that stores its key, * where every rank stores all keys."""
    topology = plan.topology
    if topology.dcp == 1:
        return [EVERY * n for n in plan.batch.seq_lens.tolist()]
    return [
        "".join(LETTERS[split_position(pos, topology.dcp, topology.interleave)[0]] for pos in range(n))
        for n in plan.batch.seq_lens.tolist()
    ]


def ruler(start: int, length: int) -> str:
    """Every tenth position above its own column, as far as the strip reaches."""
    marks: Sequence[str] = [f"{pos:<10}" for pos in range(start, start + max(length, 1), 10)]
    return "".join(marks).rstrip()
