"""Which deployments a sweep tries: every world of so many GPUs that the engine's rules, the planner and memory allow.

GPUs 16 = 2 replicas x (tp 4 x pcp 2), dcp of 1, 2, 8; interleave, partition and batch budget multiply the choices
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
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
from cpkit.sizing.sweep.candidate import Candidate
from cpkit.sizing.sweep.engines import check_engine, engine_sizes, usual_interleave, usual_partition
from cpkit.topology import legal_dcp_sizes

MAX_TP = 16
MAX_PCP = 16


@dataclass(frozen=True, slots=True)
class Choices:
    """What a sweep varies, beside the sizes of the world; raises ConfigError.

    gpus: totals. batch_tokens: query tokens of a step. partitions: of prompts; "" stands for the engine's usual one.
    interleaves: tokens; 0 stands for the engine's usual one, a block where there is a choice.
    """

    gpus: tuple[int, ...]
    batch_tokens: tuple[int, ...] = (8192,)
    partitions: tuple[str, ...] = ("",)
    interleaves: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            if not values:
                raise ConfigError(f"no {field.name.replace('_', ' ')} to try: name at least one")
            if len(set(values)) < len(values):
                raise ConfigError(f"{field.name.replace('_', ' ')} {', '.join(map(str, values))}: each once")
        for name, least in (("gpus", 1), ("batch_tokens", 1), ("interleaves", 0)):
            if (smallest := min(getattr(self, name))) < least:
                raise ConfigError(f"{name.replace('_', ' ')} {smallest}: at least {least}")
        if unknown := [name for name in self.partitions if name not in ("", *STRATEGIES)]:
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


def candidates(choices: Choices, engine: str, block_size: int) -> Iterator[Candidate]:
    """Every combination of powers of two; one PCP rank has one partition, and one DCP rank one interleave."""
    partitions = list(dict.fromkeys(name or usual_partition(engine) for name in choices.partitions))
    interleaves = list(dict.fromkeys(turn or usual_interleave(engine, block_size) for turn in choices.interleaves))
    for gpus in choices.gpus:
        for tp, pcp in itertools.product(_powers(min(MAX_TP, gpus)), _powers(min(MAX_PCP, gpus))):
            if tp * pcp > gpus or gpus % (tp * pcp):
                continue
            for dcp in legal_dcp_sizes(tp, pcp):
                turns = interleaves if dcp > 1 else [block_size]
                cuts = partitions if pcp > 1 else [usual_partition(engine)]
                for turn, cut, tokens in itertools.product(turns, cuts, choices.batch_tokens):
                    yield Candidate(gpus, tp, pcp, dcp, turn, block_size, cut, tokens)


def _powers(most: int) -> Sequence[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def sort_out(
    model: Model, chip: Chip, engine: str, limits: Limits, choices: Choices, merge: str = "ag_rs"
) -> tuple[list[Allowed], list[Refused]]:
    """Candidates that an engine's rules, the planner and the chip's memory allow, and the others with the reason.

    merge: ag_rs or a2a, of partial outputs. Drafts of the limits' budget are those of one MTP module.
    """
    common: dict[str, Any] = {"merge": merge}
    if limits.step_budget().num_speculative_tokens:
        common["speculation"] = "mtp"
    allowed: list[Allowed] = []
    refused: list[Refused] = []
    block_size = complete(engine, model, chip, {})[0].block_size
    for candidate in candidates(choices, engine, block_size):
        try:
            check_engine(candidate, engine)
            deployment, _ = complete(engine, model, chip, {**engine_sizes(candidate, engine), **common})
            allowed.append(Allowed(candidate, candidate_memory(candidate, deployment, limits)))
        except (ConfigError, PlanError) as error:
            refused.append(Refused(candidate, str(error)))
    return allowed, refused


def candidate_memory(candidate: Candidate, deployment: Deployment, limits: Limits) -> Memory:
    """Memory of a rank of a candidate; raises ConfigError with the first rule that refuses it, or what does not fit."""
    if broken := refusals(deployment):
        raise ConfigError(f"{broken[0].rule.id}: {broken[0].sentence}")
    budget = {**limits.budget, "max_num_batched_tokens": candidate.max_num_batched_tokens}
    return memory_of(deployment, replace(limits, budget=budget))
