"""A sweep: choose what to replay, replay it on several processes, keep every result in a file as it comes.

A results file is JSON lines: what the sweep is of, then one line a candidate. Started again with the same file a sweep
goes on where it was; a file of another sweep is refused.
"""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import cpkit
from cpkit.batch import Batch
from cpkit.digest import digest
from cpkit.errors import ConfigError, InputError, PlanError
from cpkit.processes import interrupts_held, interrupts_ignored, leave_with_parent
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.sweep.candidates import Allowed, Candidate, Refused
from cpkit.sizing.sweep.replay import Outcome, SweepSetting, replay
from cpkit.workload.request import Trace

FORMAT = "cpkit-sweep-1"
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


class Results:
    """The results file of a sweep, or none where path is None."""

    def __init__(self, path: Path | None, trace: Trace, setting: SweepSetting) -> None:
        self._path = path
        self._header = {"format": FORMAT, "cpkit": cpkit.__version__, "sweep": sweep_digest(trace, setting)}
        self.outcomes: dict[Candidate, Outcome] = {}
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path)
        else:
            path.write_text(json.dumps(self._header) + "\n", encoding="utf-8")

    def add(self, outcome: Outcome) -> None:
        """Keep one more."""
        self.outcomes[outcome.candidate] = outcome
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome.to_json()) + "\n")

    def _read(self, path: Path) -> None:
        """Outcomes of earlier runs; a last line that an interrupt cut short is dropped."""
        try:
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            header = json.loads(lines[0])
            found = [Outcome.from_json(json.loads(line)) for line in lines[1 : len(lines) - (not text.endswith("\n"))]]
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: not the results of a sweep ({error}); name another file") from error
        if header != self._header:
            raise InputError(f"{path}: results of another sweep (trace, model, chip, limits or version differ)")
        if not text.endswith("\n"):
            path.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
        self.outcomes = {outcome.candidate: outcome for outcome in found}


def sweep_digest(trace: Trace, setting: SweepSetting) -> str:
    """A fingerprint of everything that outcomes depend on but the candidate."""
    requests = [
        (
            [request.prompt_len, request.output_len, -1 if request.depends_on is None else request.depends_on],
            repr((request.arrival_s, request.think_time_s, request.hash_block_size)),
            request.block_hashes,
        )
        for request in trace.requests
    ]
    return digest((requests, repr(setting)))


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
    """Seconds that GPUs spend on an average request: its prompt in full steps, its outputs in steps of many decodes."""
    candidate, memory = one.candidate, one.memory
    prompt = max(int(np.mean([request.prompt_len for request in trace.requests])), 2)
    output = float(np.mean([request.output_len for request in trace.requests]))
    budget = memory.settings.budget
    settings = StepSettings(memory.settings.topology, setting.model, budget, candidate.partition, setting.merge)
    cost = CostModel(setting.model, setting.weights, settings.topology, chip(setting.chip), setting.assumptions)
    query = min(budget.max_num_batched_tokens, prompt)
    num_decodes = max(1, min(SCREEN_BATCH, budget.max_num_seqs, memory.tokens // prompt))
    prefill = Batch.from_lens([prompt], [query], [prompt])
    decodes = Batch.from_lens([prompt] * num_decodes, [1] * num_decodes, [prompt - 1] * num_decodes)
    prefill_s, decode_s = (cost.step_cost(settings.plan(batch, 0)).seconds() for batch in (prefill, decodes))
    return settings.topology.replica_size * (prefill_s * prompt / query + decode_s * output / num_decodes)


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
