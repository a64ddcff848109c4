"""How many KV blocks a chip has room for, and the sentence that says why."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpkit.errors import ConfigError

if TYPE_CHECKING:  # plans need numpy, which --help does without
    from cpkit.settings import StepSettings

DEFAULT_WEIGHT_SHARE = 0.5
"""Of a chip's memory: what weights are assumed to take where nothing is said, in worlds too small for them as well."""

NUM_WORKSPACES = 2
"""Index workspaces at once: the next is filled while one is scored."""

MAX_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks: block ids, the null block included; source: where the number comes from, for the report."""

    num_blocks: int
    source: str


def default_pool(
    settings: "StepSettings", *, max_model_len: int, chip: str, weights_gb: float | None, utilization: float
) -> PoolSize:
    """KV blocks that fit: (memory * utilization - weights - buffers) / bytes of a block on one rank, by plan_memory.

    weights_gb: of one rank, in 10^9 bytes; None: half the chip's memory. Raises ConfigError when no block fits.
    """
    from cpkit.sizing.chips import chip as known_chip
    from cpkit.sizing.figures import Figure
    from cpkit.sizing.memory.plan import MemorySettings, plan_memory

    if utilization > 1:
        raise ConfigError(f"--gpu-memory-utilization {utilization:g}: a share of the memory is at most 1")
    accelerator = known_chip(chip)
    memory_gb = accelerator.hbm_bytes.value / 1e9
    if weights_gb is None:
        weights_gb = DEFAULT_WEIGHT_SHARE * memory_gb
        weights = Figure(1e9 * weights_gb, "assumed", "assumed half the chip")
    else:
        weights = Figure(1e9 * weights_gb, "given", "as stated")
    try:
        memory = plan_memory(
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
    except ConfigError as error:
        raise ConfigError(f"{error}; or lower --weights-gb, or give --num-kv-blocks") from error
    buffers_gb = sum(buffer.bytes for buffer in memory.buffers) / 1e9
    source = (
        f"{chip}, {memory_gb:g} GB x {utilization:g} less {weights_gb:g} GB of weights ({weights.source}) "
        f"and {buffers_gb:.1f} GB of buffers, {memory.block_bytes / 1e6:.2f} MB a block"
        f"{' with its draft keys' if memory.settings.draft_layers else ''}"
    )
    return PoolSize(min(memory.num_blocks, MAX_BLOCKS), source)
