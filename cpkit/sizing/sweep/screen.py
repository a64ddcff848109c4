"""Which candidates are worth a replay: an average request of the trace, costed in two planned steps.

its prompt      steps full of its tokens, at the end of the prompt
its outputs     steps of up to SCREEN_BATCH decodes, each behind such a prompt and with its drafts
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from cpkit.batch import Batch
from cpkit.errors import ConfigError
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.drafts import kept_tokens
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.cost.step import StepCost
from cpkit.sizing.sweep.candidates import Allowed, Refused
from cpkit.sizing.sweep.replay import SweepSetting
from cpkit.workload.request import Trace

SCREEN_BATCH = 64
"""Decodes of the step that screening times, where pool and batch budget hold so many."""


def screen(
    allowed: Sequence[Allowed], trace: Trace, setting: SweepSetting, limit: int | None
) -> tuple[list[Allowed], list[Refused]]:
    """The candidates worth replaying, at most limit, and the others with the reason.

    First come those whose GPUs spend least time on an average request, as far as one prefill step and one decode step
    tell; numbers of GPUs take turns, and so do ways of splitting queries and keys, to be compared with each other.
    Raises ConfigError for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: at least 1 deployment is replayed")
    if limit is None or len(allowed) <= limit:
        return list(allowed), []
    spent = {one.candidate: gpu_seconds(one, trace, setting) for one in allowed}
    by_gpus: dict[int, dict[tuple[bool, bool], list[Allowed]]] = {}
    for one in sorted(allowed, key=lambda one: spent[one.candidate]):
        kind = one.candidate.pcp > 1, one.candidate.dcp > 1
        by_gpus.setdefault(one.candidate.gpus, {}).setdefault(kind, []).append(one)
    turns = [  # the best of each kind, the best kind first; then the second of each
        (place, turn, gpus, one)
        for gpus, kinds in by_gpus.items()
        for turn, group in enumerate(kinds.values())
        for place, one in enumerate(group)
    ]
    ordered = [turn[-1] for turn in sorted(turns, key=lambda turn: turn[:-1])]
    least = {gpus: next(iter(kinds.values()))[0].candidate for gpus, kinds in by_gpus.items()}
    out = [
        Refused(
            one.candidate,
            f"not replayed (--limit {limit}): an average request takes {spent[one.candidate]:,.1f} GPU-seconds, "
            f"{spent[least[one.candidate.gpus]]:,.1f} with {least[one.candidate.gpus].name}",
        )
        for one in ordered[limit:]
    ]
    return ordered[:limit], out


def gpu_seconds(one: Allowed, trace: Trace, setting: SweepSetting) -> float:
    """Seconds that GPUs spend on an average request."""
    steps_s = sum(number * step.seconds() for step, number in average_request(one, trace, setting))
    return one.memory.settings.topology.replica_size * steps_s


def average_request(one: Allowed, trace: Trace, setting: SweepSetting) -> list[tuple[StepCost, float]]:
    """The two costed steps of an average request, and how many of each it takes."""
    candidate, memory = one.candidate, one.memory
    budget = memory.settings.budget
    row = budget.decode_threshold  # tokens of a decode
    prompt = max(int(np.mean([request.prompt_len for request in trace.requests])), 1 + row)
    output = float(np.mean([request.output_len for request in trace.requests]))
    settings = StepSettings(memory.settings.topology, setting.model, budget, candidate.partition, setting.merge)
    cost = CostModel(
        setting.model, setting.weights, settings.topology, chip(setting.chip), setting.assumptions, setting.engine
    )
    query = min(budget.max_num_batched_tokens, prompt)
    most = min(SCREEN_BATCH, budget.max_num_seqs, budget.max_num_batched_tokens // row)
    num_decodes = max(1, min(most, memory.tokens // prompt))
    prefill = Batch.from_lens([prompt], [query], [prompt])
    decodes = Batch.from_lens([prompt] * num_decodes, [row] * num_decodes, [prompt - row] * num_decodes)
    kept = kept_tokens(budget.num_speculative_tokens, setting.acceptance_rate)
    numbers = (prompt / query, output / (num_decodes * kept))
    return [
        (cost.step_cost(settings.plan(batch, 0)), number)
        for batch, number in zip((prefill, decodes), numbers, strict=True)
    ]


def source_kinds(one: Allowed, trace: Trace, setting: SweepSetting) -> dict[str, float]:
    """Seconds of an average request by the kind of their source."""
    found: defaultdict[str, float] = defaultdict(float)
    for step, number in average_request(one, trace, setting):
        for kind, seconds in step.seconds_by_kind().items():
            found[kind] += number * seconds
    return dict(found)
