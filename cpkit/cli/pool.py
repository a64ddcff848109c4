"""How many KV blocks a chip has room for, and the sentences that say why."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cpkit.errors import ConfigError

if TYPE_CHECKING:  # plans need numpy, which --help does without
    from cpkit.settings import StepSettings
    from cpkit.sizing.figures import Figure
    from cpkit.sizing.memory.plan import Memory

STAND_IN_SHARE = 0.5
"""Of a chip's memory: what weights are assumed to take in worlds that cannot hold the model, which are replayed too."""

NUM_WORKSPACES = 2
"""Index workspaces at once: the next is filled while one is scored."""

MAX_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks: block ids, the null block included; source: where the number comes from, for the report.

    note: what is assumed where the ranks cannot hold the model, else empty. memory: of the rank that was counted; None
    where the number was given.
    """

    num_blocks: int
    source: str
    note: str = ""
    memory: "Memory | None" = None


def default_pool(
    settings: "StepSettings", *, max_model_len: int, chip: str, weights: "Figure", utilization: float
) -> PoolSize:
    """KV blocks that fit: (memory * utilization - weights - buffers) / bytes of a block on one rank, by lay_out.

    weights: bytes of one rank, given or assumed; assumed ones that leave no room make way for half the chip's memory,
    and the note says so. Raises ConfigError when no block fits.
    """
    from cpkit.sizing.chips import chip as known_chip
    from cpkit.sizing.figures import Figure
    from cpkit.sizing.memory.plan import MemorySettings, check_room, lay_out

    if utilization > 1:
        raise ConfigError(f"--gpu-memory-utilization {utilization:g}: a share of the memory is at most 1")
    accelerator = known_chip(chip)
    memory = lay_out(
        MemorySettings(
            model=settings.model,
            topology=settings.topology,
            budget=settings.budget,
            chip=accelerator,
            weights=weights,
            utilization=Figure(utilization, "given", "--gpu-memory-utilization"),
            max_model_len=max_model_len,
            merge=settings.merge,
            num_workspaces=NUM_WORKSPACES,
            draft_layers=int(settings.budget.num_speculative_tokens > 0),  # an MTP module, as the cost model has it
        )
    )
    note = ""
    if weights.kind == "assumed" and not memory.has_room:
        half = Figure(STAND_IN_SHARE * accelerator.hbm_bytes.value, "assumed", "half the chip")
        note = _note(memory, half)
        memory = lay_out(replace(memory.settings, weights=half))
    try:
        check_room(memory)
    except ConfigError as error:
        raise ConfigError(f"{error}; or give other --weights-gib, or --num-kv-blocks") from error
    how = "estimated" if weights.kind == "assumed" and not note else memory.settings.weights.kind
    return PoolSize(min(memory.num_blocks, MAX_BLOCKS), _source(memory, how), note, memory)


def _note(memory: "Memory", half: "Figure") -> str:
    """What does not fit, and what is assumed instead."""
    from cpkit.report.table import plural, size

    settings = memory.settings
    return (
        f"{plural(settings.topology.world_size, 'rank')} of {settings.chip.name} cannot hold {settings.model.name}: "
        f"{size(settings.weights.value)} of weights and {size(memory.buffer_bytes)} of buffers each, where "
        f"{size(memory.usable)} may be used; the pool assumes weights of half the chip, {size(half.value)}"
    )


def _source(memory: "Memory", how: str) -> str:
    """The chip less what it holds, and how its weights are known."""
    from cpkit.report.table import size

    settings = memory.settings
    draft = " with its draft keys" if settings.draft_layers else ""
    return (
        f"{settings.chip.name}, {size(settings.chip.hbm_bytes.value)} x {settings.utilization.value:g} less "
        f"{size(settings.weights.value)} of weights and {size(memory.buffer_bytes)} of buffers a rank, "
        f"{size(memory.block_bytes)} a block{draft}; weights {how}: {settings.weights.source}"
    )
