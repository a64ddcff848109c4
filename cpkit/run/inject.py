"""Carry out a fault that a run was asked for: what the rank is given, whether it comes, and what it sends.

before the step     killed, stopped, early-return
its plan            another batch or other settings: the first change that can be planned and differs
its collectives     the first one is left out, or has another dtype
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from cpkit.batch import Batch
from cpkit.comm.base import Comm
from cpkit.comm.faulty import FAULTS, FaultyComm
from cpkit.errors import ConfigError, InputError, PlanError
from cpkit.planner.partition import STRATEGIES
from cpkit.run.injection import PLANNED, Injection
from cpkit.run.steps import RunSteps
from cpkit.settings import StepSettings
from cpkit.step import StepPlan

Change = tuple[Batch, StepSettings]


class Injector:
    """One rank's part in an injection: none, unless it is the rank that was named.

    comm: what the rank's program is to use.
    """

    def __init__(self, injection: Injection | None, comm: Comm) -> None:
        self._injection = injection if injection is not None and injection.rank == comm.rank else None
        self._faulty = FaultyComm(comm) if self._injection is not None and self._injection.kind in FAULTS else None
        self.comm = self._faulty or comm

    def due(self, step: int) -> Injection | None:
        """The injection, if it is this rank's and at this step."""
        one = self._injection
        return one if one is not None and one.step == step else None

    def leaves(self, step: int) -> bool:
        """What happens before a step: the rank may die or stop here; True when it is to leave the step."""
        one = self.due(step)
        if one is None:
            return False
        if one.kind == "killed":
            _die(self.comm)
        elif one.kind == "stopped":
            _stop(self.comm, one.seconds)
        elif self._faulty is not None:
            self._faulty.fault = one.kind
        return one.kind == "early-return"

    def plan(self, step: int, batch: Batch, settings: StepSettings) -> StepPlan:
        """The rank's plan of a step."""
        one = self.due(step)
        if one is None or one.kind not in PLANNED:
            return settings.plan(batch, self.comm.rank)
        return changed_plan(one, batch, settings)


def check_injection(injection: Injection, steps: RunSteps, settings: StepSettings) -> None:
    """Raise InputError unless the fault can happen in this run: there are such a rank and step, and a difference."""
    size, num_steps = settings.topology.world_size, len(steps.batches)
    if injection.rank >= size or injection.step >= num_steps:
        raise InputError(f"--inject {injection}: the run has {size} ranks and {num_steps} steps, counted from 0")
    batch = steps.batches[injection.step]
    if injection.kind in PLANNED:
        changed_plan(injection, batch, settings)
    elif injection.kind in FAULTS:
        collectives = settings.plan(batch, injection.rank).collectives
        if not any((*collectives.layers, collectives.step)):
            raise InputError(f"--inject {injection}: that step has no collective")


def changed_plan(injection: Injection, batch: Batch, settings: StepSettings) -> StepPlan:
    """The rank's plan after the first change of the kind that can be planned and gives another plan."""
    right = settings.plan(batch, injection.rank).digests()
    for make in _CHANGES[injection.kind](batch, settings):
        try:
            changed, other = make()
            plan = other.plan(changed, injection.rank)
        except (ConfigError, PlanError):
            continue
        if plan.digests() != right:
            return plan
    raise InputError(f"--inject {injection}: nothing of this kind changes the plan of step {injection.step}")


Maker = Callable[[], Change]
"""Makes a change when it is called, as not every change gives a batch or settings that can be."""


def _stale_seq_len(batch: Batch, settings: StepSettings) -> Iterator[Maker]:
    for change in (-1, 1):
        for req in reversed(range(batch.num_reqs)):
            lens = batch.seq_lens + change * (np.arange(batch.num_reqs) == req)
            yield lambda lens=lens: (replace(batch, seq_lens=lens), settings)  # type: ignore[misc]


def _dropped_request(batch: Batch, settings: StepSettings) -> Iterator[Maker]:
    if batch.num_reqs > 1:
        yield lambda: (_pick(batch, np.arange(batch.num_reqs - 1)), settings)


def _extra_request(batch: Batch, settings: StepSettings) -> Iterator[Maker]:
    twice = [*range(batch.num_reqs), batch.num_reqs - 1]
    yield lambda: (_pick(batch, np.array(twice)), settings)


def _reordered_requests(batch: Batch, settings: StepSettings) -> Iterator[Maker]:
    for req in range(batch.num_reqs - 1):
        order = np.arange(batch.num_reqs)
        order[[req, req + 1]] = req + 1, req
        yield lambda order=order: (_pick(batch, order), settings)  # type: ignore[misc]


def _pick(batch: Batch, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Batch:
    tables = None if batch.block_tables is None else batch.block_tables[order]
    lens = {name: getattr(batch, name)[order] for name in ("seq_lens", "query_lens", "prompt_lens", "req_ids")}
    return Batch(**lens, block_tables=tables)


def _other_size(name: str) -> Callable[[Batch, StepSettings], Iterator[Maker]]:
    """Twice or half the interleave or the block size."""

    def changes(batch: Batch, settings: StepSettings) -> Iterator[Maker]:
        size = getattr(settings.topology, name)
        for other in (2 * size, size // 2):
            yield lambda other=other: (  # type: ignore[misc]
                batch,
                replace(settings, topology=replace(settings.topology, **{name: other})),
            )

    return changes


def _other_partition(batch: Batch, settings: StepSettings) -> Iterator[Maker]:
    for strategy in STRATEGIES:
        yield lambda strategy=strategy: (batch, replace(settings, partition=strategy))  # type: ignore[misc]


def _other_budget(batch: Batch, settings: StepSettings) -> Iterator[Maker]:
    """The smallest workspace that can be planned, as it cuts the most chunks."""
    tokens = 1
    while tokens < settings.budget.workspace_tokens:
        budget = replace(settings.budget, workspace_tokens=tokens)
        yield lambda budget=budget: (batch, replace(settings, budget=budget))  # type: ignore[misc]
        tokens *= 2


_CHANGES: dict[str, Callable[[Batch, StepSettings], Iterator[Maker]]] = {
    "stale-seq-len": _stale_seq_len,
    "dropped-request": _dropped_request,
    "extra-request": _extra_request,
    "reordered-requests": _reordered_requests,
    "other-interleave": _other_size("interleave"),
    "other-block-size": _other_size("block_size"),
    "other-partition": _other_partition,
    "other-budget": _other_budget,
}


def _die(comm: Comm) -> None:
    if comm.shares_process:
        threading.Event().wait()  # its thread ends with the process
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(comm: Comm, seconds: float) -> None:
    if comm.shares_process:
        time.sleep(seconds)
        return
    waker = subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()
