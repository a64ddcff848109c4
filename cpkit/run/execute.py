"""Run steps on a world of ranks and verify them: the same program whether ranks are threads, processes or GPUs.

steps ─► each rank: plan ─► guard ─► layers ─► verify ─► its report
                                                           └─► gathered, so that any rank can tell all
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cpkit.activations.generate import Activations
from cpkit.builders.backend import choose_backend
from cpkit.comm.base import Comm
from cpkit.comm.connect import run_program
from cpkit.comm.faulty import FAULTS
from cpkit.comm.key_gather import check_gather
from cpkit.comm.patience import TIMEOUT_S
from cpkit.consistency.guard import StepGuard, steps_between
from cpkit.errors import ConfigError
from cpkit.oracle import Oracle
from cpkit.run.inject import Injector
from cpkit.run.injection import Injection
from cpkit.run.steps import RunSteps
from cpkit.run.verify import MODES, Findings, Mismatch, Verifier
from cpkit.settings import StepSettings
from cpkit.worker.clock import STAGES
from cpkit.worker.history import write_history
from cpkit.worker.places import Places
from cpkit.worker.program import RankProgram, StepResult
from cpkit.worker.token_activations import TokenActivations


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How steps are run.

    comm: auto, sim, torch or mpi. device: cpu or cuda. verify: all, sample or none; seed: of the sample. timeout_s: how
    long a rank waits for the others of a collective. backend: of the indexer's kernels: torch, triton, or auto, which
    is triton on GPUs and torch on CPUs. guard: steps before which ranks compare their plans: every, sample:K or off.
    inject: what one rank does wrong, if anything. gather: how index keys of all shards are gathered: collective, or
    symmetric, out of the other GPUs' memory.
    """

    comm: str = "auto"
    device: str = "cpu"
    verify: str = "sample"
    seed: int = 0
    timeout_s: float = TIMEOUT_S
    backend: str = "auto"
    guard: str = "every"
    inject: Injection | None = None
    gather: str = "collective"

    def __post_init__(self) -> None:
        if self.verify not in MODES:
            raise ConfigError(f"verify {self.verify!r}: use one of {', '.join(MODES)}")
        steps_between(self.guard)
        check_gather(self.gather)
        if self.gather == "symmetric" and self.inject is not None and self.inject.kind in FAULTS:
            raise ConfigError(
                f"inject {self.inject} with gather symmetric: the fault is of a collective, and that gather goes past "
                "the comm that carries it out; use gather collective"
            )


@dataclass(frozen=True, slots=True, eq=False)
class RankReport:
    """What one rank has to tell.

    backend: that its indexer's kernels ran on. seconds: by stage. calls, bytes: of collectives, by "op over group:
    what", planned and issued alike. selections, outputs: digests over all steps and layers of the keys chosen (in
    ascending order) and of the outputs' bits.
    """

    rank: int
    backend: str
    findings: Findings
    seconds: dict[str, float]
    calls: dict[str, int]
    bytes: dict[str, int]
    selections: str
    outputs: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RankReport":
        """Undoes asdict."""
        findings = dict(data["findings"])
        if findings["first"] is not None:
            findings["first"] = Mismatch(**findings["first"])
        return cls(**{**data, "findings": Findings(**findings)})


def execute(
    steps: RunSteps, settings: StepSettings, activations: Activations, options: RunOptions
) -> tuple[int, list[RankReport]]:
    """Run and verify; returns the lowest rank of this process and the reports of all ranks, in rank order.

    Raises ConfigError, PlanError, DesyncError, and what a rank raises.
    """
    source = TokenActivations(activations, steps.content, settings.model.num_heads)
    oracle = Oracle(source)

    def program(comm: Comm) -> list[RankReport]:
        return gather_reports(comm, run_rank(comm, steps, settings, oracle, options))

    results = run_program(
        program, settings.topology, kind=options.comm, device=options.device, timeout_s=options.timeout_s
    )
    rank = min(results)
    return rank, results[rank]


def run_rank(comm: Comm, steps: RunSteps, settings: StepSettings, oracle: Oracle, options: RunOptions) -> RankReport:
    """All steps on one rank."""
    backend = choose_backend(None if options.backend == "auto" else options.backend, comm.device)
    injector = Injector(options.inject, comm)
    guard = StepGuard(injector.comm, options.guard, limit_s=options.timeout_s)
    program = RankProgram(
        injector.comm,
        settings,
        steps.pool,
        oracle.source,
        backend,
        gather=options.gather,
        timeout_s=options.timeout_s,
    )
    verifier = Verifier(oracle, comm.rank, options.verify, options.seed)
    selections, outputs = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    clock = program.clock
    for number, batch in enumerate(steps.batches):
        with clock.stage("plan"):
            if injector.leaves(number):
                continue
            plan = injector.plan(number, batch, settings)
            guard.check(number, plan)
        if number == 0 and steps.has_history:
            write_history(Places(plan, plan.rank(comm.rank), comm.device), program.layers, oracle.source)
        result = program.run_step(plan)
        with clock.stage("verify"):
            _feed(selections, outputs, result)
            if options.verify != "none":
                verifier.check(number, result)
    guard.close()
    totals = {
        f"{op} over {group}: {what}": program.collectives[op, group, what]
        for op, group, what in sorted(program.collectives)
    }
    return RankReport(
        rank=comm.rank,
        backend=backend,
        findings=verifier.findings,
        seconds={stage: clock.seconds.get(stage, 0.0) for stage in STAGES},
        calls={name: total.calls for name, total in totals.items()},
        bytes={name: total.bytes for name, total in totals.items()},
        selections=selections.hexdigest(),
        outputs=outputs.hexdigest(),
    )


def gather_reports(comm: Comm, report: RankReport) -> list[RankReport]:
    """The reports of all ranks, on every rank."""
    text = json.dumps(asdict(report)).encode()
    longest = comm.all_reduce(torch.tensor([len(text)], device=comm.device), "world", what="report", reduction="max")
    sent = torch.frombuffer(bytearray(text.ljust(int(longest[0]))), dtype=torch.uint8).to(comm.device)
    gathered = comm.all_gather(sent, "world", what="report").view(comm.size, -1).cpu().numpy()
    return [RankReport.from_json(json.loads(row.tobytes())) for row in gathered]


def _feed(selections: Any, outputs: Any, result: StepResult) -> None:
    for layer in result.layers:
        outputs.update(layer.out.cpu().numpy().tobytes())
        if layer.selection is not None:
            selections.update(layer.selection.sort(1).values.cpu().numpy().tobytes())
