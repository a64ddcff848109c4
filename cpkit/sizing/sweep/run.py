"""A sweep: what was chosen is replayed on several processes, and every result is kept as it comes."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from cpkit.errors import ConfigError, PlanError
from cpkit.processes import interrupts_held, interrupts_ignored, leave_with_parent
from cpkit.sizing.sweep.candidate import Candidate
from cpkit.sizing.sweep.candidates import Allowed, Refused
from cpkit.sizing.sweep.replay import Outcome, SweepSetting, replay
from cpkit.sizing.sweep.results import Results
from cpkit.workload.request import Trace


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
