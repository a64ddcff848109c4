"""Which deployments a sweep tries: every world of so many GPUs that the engine's rules, the planner and memory allow.

GPUs 16 = 2 replicas x (tp 4 x pcp 2), dcp of 1, 2, 8; interleave, partition and batch budget multiply the choices
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from cpkit.errors import ConfigError, PlanError
from cpkit.model import Model
from cpkit.planner.partition import STRATEGIES
from cpkit.sizing.chips import Chip
from cpkit.sizing.deployment import Deployment
from cpkit.sizing.memory.deployment import Limits, memory_of
from cpkit.sizing.memory.plan import Memory
from cpkit.sizing.rules.defaults import complete
from cpkit.sizing.rules.engines import refusals
from cpkit.topology import legal_dcp_sizes

MAX_TP = 16
MAX_PCP = 16


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One deployment: `replicas` worlds of tp * pcp GPUs, each with its share of the requests.

    interleave, block_size: tokens. partition: one of the planner's. max_num_batched_tokens: the batch budget.
    """

    gpus: int
    tp: int
    pcp: int
    dcp: int
    interleave: int
    block_size: int
    partition: str
    max_num_batched_tokens: int

    @property
    def replicas(self) -> int:
        """Worlds that the GPUs make."""
        return self.gpus // (self.tp * self.pcp)

    @property
    def name(self) -> str:
        """Short, and unique among those of as many GPUs.  2x tp4 pcp2 dcp8, 8k"""
        tokens = self.max_num_batched_tokens
        budget = f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"
        turns = f" i{self.interleave}" if self.dcp > 1 and self.interleave != self.block_size else ""
        cut = f" {self.partition.replace('_', '-')}" if self.pcp > 1 and self.partition != "head_tail" else ""
        return f"{self.replicas}x tp{self.tp} pcp{self.pcp} dcp{self.dcp}{turns}{cut}, {budget}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Choices:
    """What a sweep varies, beside the sizes of the world; raises ConfigError.

    gpus: totals. batch_tokens: query tokens of a step. partitions: of prompts. interleaves: tokens; 0 stands for the
    block size.
    """

    gpus: tuple[int, ...]
    batch_tokens: tuple[int, ...] = (8192,)
    partitions: tuple[str, ...] = ("head_tail",)
    interleaves: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name):
                raise ConfigError(f"no {field.name.replace('_', ' ')} to try: name at least one")
        if unknown := [name for name in self.partitions if name not in STRATEGIES]:
            raise ConfigError(f"partition {unknown[0]!r}: use some of {', '.join(STRATEGIES)}")


@dataclass(frozen=True, slots=True)
class Refused:
    """A candidate that cannot work, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """A candidate that can work, and its memory on one rank."""

    candidate: Candidate
    memory: Memory


def candidates(model: Model, choices: Choices, block_size: int) -> Iterator[Candidate]:
    """Every combination of powers of two; one PCP rank has one partition, and one DCP rank one interleave."""
    for gpus in choices.gpus:
        for tp, pcp in itertools.product(_powers(min(MAX_TP, gpus)), _powers(min(MAX_PCP, gpus))):
            if tp * pcp > gpus or gpus % (tp * pcp):
                continue
            for dcp in legal_dcp_sizes(tp, pcp):
                interleaves = choices.interleaves if dcp > 1 else (0,)
                partitions = choices.partitions if pcp > 1 else ("head_tail",)
                for turn, partition, tokens in itertools.product(interleaves, partitions, choices.batch_tokens):
                    yield Candidate(gpus, tp, pcp, dcp, turn or block_size, block_size, partition, tokens)


def _powers(most: int) -> Sequence[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def sort_out(
    model: Model, chip: Chip, engine: str, limits: Limits, choices: Choices, merge: str = "ag_rs"
) -> tuple[list[Allowed], list[Refused]]:
    """Candidates that an engine's rules, the planner and the chip's memory allow, and the others with the reason.

    merge: ag_rs or a2a, of partial outputs.
    """
    allowed: list[Allowed] = []
    refused: list[Refused] = []
    block_size = complete(engine, model, chip, {})[0].block_size
    for candidate in candidates(model, choices, block_size):
        try:
            deployment, _ = complete(engine, model, chip, {**engine_sizes(candidate, engine), "merge": merge})
            allowed.append(Allowed(candidate, candidate_memory(candidate, deployment, limits)))
        except (ConfigError, PlanError) as error:
            refused.append(Refused(candidate, str(error)))
    return allowed, refused


def engine_sizes(candidate: Candidate, engine: str) -> dict[str, Any]:
    """A candidate's sizes as an engine counts them: SGLang's tp is the replica, which prefill CP is cut out of."""
    given: dict[str, Any] = {"tp": candidate.tp, "pcp": candidate.pcp, "dcp": candidate.dcp}
    given["block_size"] = candidate.block_size
    if engine != "sglang":
        return given | ({"interleave": candidate.interleave} if candidate.dcp > 1 else {})
    given["tp"] *= candidate.pcp
    if candidate.pcp > 1:
        strategy = "interleave" if candidate.partition == "round_robin" else "zigzag"
        given |= {"prefill_cp": True, "cp_strategy": strategy}
    return given


def candidate_memory(candidate: Candidate, deployment: Deployment, limits: Limits) -> Memory:
    """Memory of a rank of a candidate; raises ConfigError with the first rule that refuses it, or what does not fit."""
    if broken := refusals(deployment):
        raise ConfigError(f"{broken[0].rule.id}: {broken[0].sentence}")
    budget = {**limits.budget, "max_num_batched_tokens": candidate.max_num_batched_tokens}
    return memory_of(deployment, replace(limits, budget=budget))
