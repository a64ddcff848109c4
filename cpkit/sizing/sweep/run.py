"""A sweep: choose what to replay, replay it on several processes, keep every result as it comes."""

import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from cpkit.batch import Batch
from cpkit.errors import ConfigError, PlanError
from cpkit.processes import interrupts_held, interrupts_ignored, leave_with_parent
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.cost.step import StepCost
from cpkit.sizing.sweep.candidate import Candidate
from cpkit.sizing.sweep.candidates import Allowed, Refused
from cpkit.sizing.sweep.replay import Outcome, SweepSetting, replay
from cpkit.sizing.sweep.results import Results
from cpkit.workload.request import Trace

SCREEN_BATCH = 64
"""Decodes of the step that screening times, where the pool holds so many."""


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """num_done: candidates replayed, earlier runs' included, of num_all."""

    num_done: int
    num_all: int
    latest: str


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What a process needs for one candidate."""

    trace: Trace
    setting: SweepSetting
    candidate: Candidate
    num_blocks: int


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
    """An average request as costed steps, and how many of each: its prompt in full steps, its outputs in steps of many
    decodes.
    """
    candidate, memory = one.candidate, one.memory
    prompt = max(int(np.mean([request.prompt_len for request in trace.requests])), 2)
    output = float(np.mean([request.output_len for request in trace.requests]))
    budget = memory.settings.budget
    settings = StepSettings(memory.settings.topology, setting.model, budget, candidate.partition, setting.merge)
    cost = CostModel(
        setting.model, setting.weights, settings.topology, chip(setting.chip), setting.assumptions, setting.engine
    )
    query = min(budget.max_num_batched_tokens, prompt)
    num_decodes = max(1, min(SCREEN_BATCH, budget.max_num_seqs, memory.tokens // prompt))
    prefill = Batch.from_lens([prompt], [query], [prompt])
    decodes = Batch.from_lens([prompt] * num_decodes, [1] * num_decodes, [prompt - 1] * num_decodes)
    numbers = (prompt / query, output / num_decodes)
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


def run_sweep(
    chosen: Sequence[Allowed],
    trace: Trace,
    setting: SweepSetting,
    results: Results,
    *,
    processes: int,
    on_progress: Callable[[SweepProgress], None] = lambda progress: None,
) -> tuple[list[Outcome], list[Refused]]:
    """Replay what results do not hold yet; outcomes in the candidates' order, and those with a step beyond planning.

    Candidates with few replicas have the most to replay and come first, so that no long one is left at the end.
    """
    missing = [one for one in chosen if one.candidate not in results.outcomes]
    missing.sort(key=lambda one: (one.candidate.replicas, one.candidate))
    failed: list[Refused] = []
    done = len(chosen) - len(missing)
    jobs = [_Job(trace, setting, one.candidate, one.memory.num_blocks) for one in missing]
    on_progress(SweepProgress(done, len(chosen), "starting"))
    for candidate, outcome in _replayed(jobs, processes):
        done += 1
        if isinstance(outcome, str):
            failed.append(Refused(candidate, outcome))
        else:
            results.add(outcome)
        on_progress(SweepProgress(done, len(chosen), candidate.name))
    found = [results.outcomes[one.candidate] for one in chosen if one.candidate in results.outcomes]
    return found, failed


def _replayed(jobs: Sequence[_Job], processes: int) -> Iterator[tuple[Candidate, Outcome | str]]:
    """Outcomes as they come, or the sentence why there is none."""
    if processes == 1 or len(jobs) < 2:
        for job in jobs:
            yield job.candidate, _replay(job)
        return
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=leave_with_parent)
    try:
        with interrupts_held():
            pending = {pool.submit(_replay, job): job.candidate for job in jobs}
        for future in as_completed(pending):
            yield pending[future], future.result()
    except BrokenProcessPool as error:
        raise ConfigError(
            f"one of {processes} processes was ended from outside, most likely for want of memory: use fewer"
        ) from error
    except (KeyboardInterrupt, GeneratorExit):
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # a replay may take minutes, and what is done is kept
        raise
    finally:
        with interrupts_ignored():
            pool.shutdown(wait=True, cancel_futures=True)


def _replay(job: _Job) -> Outcome | str:
    try:
        return replay(job.trace, job.setting, job.candidate, job.num_blocks)
    except (ConfigError, PlanError) as error:
        return str(error)
