"""Replay a trace through a scheduler, plan every step for every rank, check the plans: the loop, without any printing.

    trace -> Scheduler -> batch -> plan for rank 0, 1, ... each on its own -> check -> record -> Simulation

The schedule does not depend on the plans, so other processes can plan steps while the scheduler goes on. Records are
kept in step order: the result is the same for any number of processes.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, islice
from time import perf_counter

from cpkit.batch import Batch
from cpkit.errors import ConfigError
from cpkit.processes import interrupts_held, interrupts_ignored, leave_with_parent
from cpkit.settings import StepSettings
from cpkit.simulate.cost import summarise_cost
from cpkit.simulate.pressure import Pressure
from cpkit.simulate.record import StepRecord, record_step
from cpkit.simulate.result import ReplaySettings, Simulation, summarise
from cpkit.sizing.cost.clock import PlannedClock
from cpkit.workload.request import Trace
from cpkit.workload.scheduler import ScheduledStep, Scheduler
from cpkit.workload.stats import ReplayStats

LOT_PLANS = 64
"""Plans of a lot, about: a fraction of a second of work, so that an interrupt waits for little and loses little."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay has come: steps planned; requests finished or refused, of all; seconds since the start."""

    num_steps: int
    num_done: int
    num_requests: int
    max_steps: int | None
    elapsed_s: float

    @property
    def fraction(self) -> float:
        """Share of the whole, by requests or by steps, whichever ends first."""
        by_requests = self.num_done / self.num_requests
        return by_requests if self.max_steps is None else max(by_requests, self.num_steps / self.max_steps)


@dataclass(frozen=True, slots=True, eq=False)
class Lot:
    """Neighbouring steps as (index, batch), and the scheduler's counts behind the last of them."""

    steps: tuple[tuple[int, Batch], ...]
    stats: ReplayStats


def simulate(
    trace: Trace,
    settings: StepSettings,
    replay: ReplaySettings,
    *,
    clock: PlannedClock | None = None,
    on_step: Callable[[ScheduledStep], None] = lambda step: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Simulation:
    """Replay a trace to its end, or to replay.max_steps; an interrupt (Ctrl-C) ends it early with what there is.

    clock: of the steps' durations, of the same settings; None: a rough estimate, and no figures of cost.
    on_step: called with each step as it is scheduled.
    Raises ConfigError for settings that cannot work with this trace, before the first step, or when a planning process
    is killed, and PlanError for a step that no plan can fit into the budget.
    """
    check_merge(trace, settings)
    start = perf_counter()
    scheduler = Scheduler(
        trace,
        settings.topology,
        settings.budget,
        num_kv_blocks=replay.num_kv_blocks,
        max_model_len=replay.max_model_len,
        acceptance_rate=replay.acceptance_rate,
        clock=clock,
        seed=replay.seed,
    )
    pressure = Pressure()

    def seen(step: ScheduledStep) -> None:
        pressure.add(step)
        on_step(step)

    stats = scheduler.stats
    records: list[StepRecord] = []
    complete = False
    steps = planned(lots(scheduler, settings, replay.max_steps, seen), settings, replay)
    with suppress(KeyboardInterrupt), closing(steps):
        for lot, lot_records in steps:
            records.extend(lot_records)
            stats = lot.stats
            num_done = stats.num_finished + stats.num_refused
            elapsed_s = perf_counter() - start
            on_progress(Progress(len(records), num_done, len(trace.requests), replay.max_steps, elapsed_s))
        stats = scheduler.stats  # requests behind the last step may have been refused since
        complete = True
    wall_s = perf_counter() - start
    cost = None
    if clock is not None:
        num_gpus = settings.topology.replica_size
        cost = summarise_cost(clock, pressure, stats, num_blocks=replay.num_kv_blocks, num_gpus=num_gpus)
    return summarise(trace, settings, replay, records, stats, cost=cost, wall_s=wall_s, complete=complete)


def check_merge(trace: Trace, settings: StepSettings) -> None:
    """Refuse, before any step, a world that cannot merge what this trace will ask it to merge; raises ConfigError.

    Under DCP alone every row is merged; with PCP only decodes are, so a trace of prefills can run.
    """
    if settings.topology.pcp == 1 or any(request.output_len > 1 for request in trace.requests):
        settings.model.check_merge(settings.topology)


def lots(
    scheduler: Scheduler, settings: StepSettings, max_steps: int | None, on_step: Callable[[ScheduledStep], None]
) -> Iterator[Lot]:
    """The steps of a replay, several at a time where planning one is quick; on_step sees each of them."""
    steps = watched(islice(scheduler, max_steps), on_step)
    lot_size = max(1, LOT_PLANS // settings.topology.replica_size)
    while lot := tuple((step.index, step.batch) for step in islice(steps, lot_size)):
        yield Lot(lot, scheduler.stats)


def watched(steps: Iterator[ScheduledStep], on_step: Callable[[ScheduledStep], None]) -> Iterator[ScheduledStep]:
    """The steps as they are, each shown to on_step on its way."""
    for step in steps:
        on_step(step)
        yield step


def planned(
    source: Iterator[Lot], settings: StepSettings, replay: ReplaySettings
) -> Generator[tuple[Lot, list[StepRecord]], None, None]:
    """Each lot with the records of its steps, in order; replays of a single lot need no further process."""
    head = list(islice(source, 2))
    source = chain(head, source)
    if replay.processes == 1 or len(head) < 2:
        for lot in source:
            yield lot, record_lot(settings, replay, lot.steps)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(replay.processes, mp_context=context, initializer=leave_with_parent)
    pending: deque[tuple[Lot, Future[list[StepRecord]]]] = deque()
    try:
        for lot in source:
            with interrupts_held():
                pending.append((lot, pool.submit(record_lot, settings, replay, lot.steps)))
            while pending and (pending[0][1].done() or len(pending) > 2 * replay.processes):
                lot, future = pending.popleft()
                yield lot, future.result()
        while pending:
            lot, future = pending.popleft()
            yield lot, future.result()
    except BrokenProcessPool as error:
        raise ConfigError(
            f"one of {replay.processes} planning processes was ended from outside, most likely for want of memory: "
            "use fewer processes"
        ) from error
    finally:
        with interrupts_ignored():
            pool.shutdown(wait=True, cancel_futures=True)


def record_lot(
    settings: StepSettings, replay: ReplaySettings, steps: tuple[tuple[int, Batch], ...]
) -> list[StepRecord]:
    """Plan and check some steps; runs in whichever process."""
    return [record_step(settings, index, batch, check=replay.checks(index)) for index, batch in steps]
