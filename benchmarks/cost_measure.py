"""What cost_check.py times: kernels of planned steps, and a coarse grid of shapes beside them that predicts those.

    grid     logits and top-k at a few rows and keys         becomes the tables of cpkit's kernels
    steps    planned like those of a replay, for rank 0 of one or two, and run as their plan says, run by run of each
             chunk, at shapes that lie between the grid's: keys into a workspace, logits, top-k

A timer runs the work; measure() goes through the shapes until they are done or its time is up, and hands on what it has
after each, so that a run that is cut short loses nothing.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.settings import StepSettings
from cpkit.step import StepPlan
from cpkit.topology import Topology

MODEL = "deepseek-v3.2"
HEADS, TOPK, PAGE = 64, 2048, 64

PREFILL_ROWS = (64, 256, 1024, 4096, 8192)
PREFILL_KEYS = (4096, 8192, 16384, 24576, 65536, 262144, 524288)
DECODE_ROWS = (1, 4, 16, 32, 64, 128, 256)
DECODE_KEYS = (4096, 16384, 24576, 65536, 262144, 524288)
MOST_LOGITS = 1 << 31
"""fp32 logits that a shape of the prefill grid may write: 8 GiB."""
MOST_DECODE_LOGITS = 1 << 24

PREFILLS = (8192, 32768, 131072, 524288)
"""Contexts whose last 8,192 tokens are prefilled in a step."""
DECODES = ((16, 32768), (64, 32768), (100, 50000), (16, 131072), (24, 100000), (8, 524288))
"""Requests of a decode step, and the context of each."""
DRAFTS = ((1, 64, 32768), (3, 64, 32768), (1, 16, 131072))
"""Draft tokens of a decode, requests and their context."""

Ms = dict[str, float]
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Step:
    """A step to check; rank 0 of its world is run."""

    name: str
    batch: Batch
    topology: Topology = Topology()  # noqa: RUF009  # frozen
    drafts: int = 0

    def plan(self) -> StepPlan:
        """Of rank 0, with the workspace that such contexts need."""
        model = load_model(MODEL)
        budget = default_budget(model, workspace_tokens=1 << 22, num_speculative_tokens=self.drafts)
        return StepSettings(self.topology, model, budget).plan(self.batch, 0)


def steps() -> Iterator[Step]:
    """Prefills of 8k to 512k, on one rank and on one of two; decodes, of one length, of many, and with drafts."""
    for context in PREFILLS:
        batch = Batch.from_lens([context], [8192], [context])
        yield Step(f"prefill of 8,192 tokens, context {context:,}", batch)
        yield Step(f"the same, one rank of pcp 2, context {context:,}", batch, Topology(pcp=2))
    for num_reqs, context in DECODES:
        yield Step(f"{num_reqs} decodes, context {context:,}", decodes(num_reqs, context, 1))
    yield Step(
        "64 decodes, contexts 4,096 to 131,072", Batch.from_lens([4096 * (1 + i % 32) for i in range(64)], [1] * 64)
    )
    for drafts, num_reqs, context in DRAFTS:
        name = f"{num_reqs} decodes that verify {drafts} draft{'s' * (drafts > 1)}, context {context:,}"
        yield Step(name, decodes(num_reqs, context, 1 + drafts), drafts=drafts)


def decodes(num_reqs: int, context: int, query: int) -> Batch:
    """Decodes of one length."""
    return Batch.from_lens([context] * num_reqs, [query] * num_reqs, [context - query] * num_reqs)


def prefill_grid() -> list[tuple[int, int]]:
    """(rows, keys): the last rows of one request."""
    return [
        (rows, keys)
        for keys in PREFILL_KEYS
        for rows in PREFILL_ROWS
        if rows <= keys and rows * keys <= MOST_LOGITS
    ]  # fmt: skip


def decode_grid() -> list[tuple[int, int]]:
    """(rows, keys): one token of each of several requests."""
    return [(rows, keys) for keys in DECODE_KEYS for rows in DECODE_ROWS if rows * keys <= MOST_DECODE_LOGITS]


class Timer(Protocol):
    """Runs work and says its milliseconds."""

    def prefill(self, parts: list[tuple[int, int]], num_keys: int, run: int) -> Ms:
        """Tokens (first position, count) of one chunk, scored in runs: of `keys`, `logits` and `topk`."""

    def decode(self, lens: list[int], tokens: int) -> Ms:
        """So many tokens of each request over its pages: of `logits` and `topk`."""


def measure(timer: Timer, keep: Keep, limit_s: float, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Time the grid, then the steps. keep: is handed all there is after each shape. limit_s: none is begun after it."""
    begin = time.monotonic()
    result: dict[str, Any] = {"heads": HEADS, "topk": TOPK, "grid": [], "steps": [], "left_out": []}
    work = list(shapes(timer, result))
    for number, (name, do) in enumerate(work, start=1):
        if time.monotonic() - begin > limit_s:
            result["left_out"] = [name for name, _ in work[number - 1 :]]
            say(f"{limit_s:g} s are over: {len(result['left_out'])} of {len(work)} shapes are left out")
            break
        do()
        say(f"[{time.monotonic() - begin:5.1f} s] {number:>2} of {len(work)}: {name}")
        keep(result)
    return result


def shapes(timer: Timer, result: dict[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each shape's name, and what times it and adds it to the result."""

    def prefill_point(rows: int, keys: int) -> None:
        ms, mean = timer.prefill([(keys - rows, rows)], keys, rows), keys - (rows - 1) / 2
        add_points({"mqa_logits": ms["logits"], "topk_2048": ms["topk"]}, rows, mean)

    def decode_point(rows: int, keys: int) -> None:
        ms = timer.decode([keys] * rows, 1)
        add_points({"mqa_logits_decode": ms["logits"], "topk_2048_decode": ms["topk"]}, rows, keys)

    def add_points(ms: Ms, rows: int, keys: float) -> None:
        result["grid"] += [{"kernel": kernel, "rows": rows, "keys": keys, "ms": one} for kernel, one in ms.items()]

    def add_step(step: Step) -> None:
        result["steps"].append({"name": step.name, "ms": time_step(timer, step.plan())})

    for rows, keys in prefill_grid():
        yield f"grid, prefill {rows:,} x {keys:,}", partial(prefill_point, rows, keys)
    for rows, keys in decode_grid():
        yield f"grid, decode {rows:,} x {keys:,}", partial(decode_point, rows, keys)
    for step in steps():
        yield step.name, partial(add_step, step)


def time_step(timer: Timer, plan: StepPlan) -> Ms:
    """Milliseconds of a planned step on its rank, by what it does."""
    rows = plan.ranks[0].rows
    if rows.num_decodes:
        counts = set(rows.num_tokens[: rows.num_decodes].tolist())
        assert len(counts) == 1, "a step here has as many tokens of every request"
        return timer.decode(rows.seq_lens[: rows.num_decodes].tolist(), counts.pop())
    total: defaultdict[str, float] = defaultdict(float)
    for chunk in plan.ranks[0].chunks[1]:
        parts = range(rows.num_decodes + chunk.row_start, rows.num_decodes + chunk.row_stop)
        runs = [(int(rows.start_pos[part]), int(rows.num_tokens[part])) for part in parts]
        # under PCP alone a row is scored against its own request's keys up to its end
        for name, ms in timer.prefill(runs, chunk.num_keys, chunk.run).items():
            total[name] += ms
    return dict(total)
