"""How many KV blocks a chip has room for, and the sentence that says why."""

import math
from dataclasses import dataclass

from cpkit.errors import ConfigError
from cpkit.model import Model
from cpkit.sizing.chips import chip as known_chip
from cpkit.topology import Topology

DEFAULT_WEIGHT_SHARE = 0.5
"""Of a chip's memory: what weights are assumed to take where nothing is said."""

MAX_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks: block ids, the null block included; source: where the number comes from, for the report."""

    num_blocks: int
    source: str


def default_pool(
    model: Model, topology: Topology, *, chip: str, weights_gb: float | None, utilization: float
) -> PoolSize:
    """KV blocks that fit: (memory * utilization - weights) / bytes of a block on one rank. GB are 10^9 bytes.

    A block holds block_size tokens of a rank's share of the layers (num_layers / pp, rounded up). Windows and other
    replicated caches, which do not grow with the context, are left to what utilization spares.
    weights_gb: of one rank; None: half the chip's memory. Raises ConfigError when no block fits.
    """
    memory_gb = known_chip(chip).hbm_bytes.value / 1e9
    stated = "as stated"
    if weights_gb is None:
        weights_gb, stated = DEFAULT_WEIGHT_SHARE * memory_gb, "assumed half the chip, see --weights-gb"
    if utilization > 1:
        raise ConfigError(f"--gpu-memory-utilization {utilization:g}: a share of the memory is at most 1")
    largest_stage = math.ceil(model.num_layers / topology.pp) / model.num_layers
    block_bytes = topology.block_size * model.kv_bytes() * largest_stage
    room = 1e9 * (memory_gb * utilization - weights_gb)
    if block_bytes <= 0:
        raise ConfigError(f"{model.name} keeps no paged KV: give --num-kv-blocks")
    num_blocks = min(int(room / block_bytes), MAX_BLOCKS)
    if num_blocks < 2:
        raise ConfigError(
            f"no room for KV on {chip}: {memory_gb:g} GB x {utilization:g} less {weights_gb:g} GB of weights; "
            "lower --weights-gb, or give --num-kv-blocks"
        )
    source = (
        f"{chip}, {memory_gb:g} GB x {utilization:g} less {weights_gb:g} GB of weights ({stated}), "
        f"{block_bytes / 1e6:.2f} MB a block"
    )
    return PoolSize(num_blocks, source)
