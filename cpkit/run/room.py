"""Room for the KV pool: a rank allocates the caches of all its blocks before the first step, used or not."""

import os

from cpkit.errors import InputError
from cpkit.model import Model
from cpkit.topology import Topology

MOST_GPU_BYTES = 1 << 40
"""More than any GPU has; what the GPU of a run has is left to its allocator."""


def rank_room(device: str, ranks: int) -> int:
    """Bytes that the caches of one rank may take at most; ranks: how many of them this process holds."""
    if device == "cuda":
        return MOST_GPU_BYTES
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks


def block_bytes(model: Model, topology: Topology) -> int:
    """Bytes that one block id takes on a rank, in the caches of all layers that are run."""
    total = 0
    for layer in model.layers:
        if layer.compress_ratio:
            total += topology.block_size // layer.compress_ratio * layer.key_bytes
        if layer.index and layer.runs_index:
            total += topology.block_size // layer.index.ratio * layer.index.key_bytes
        total += topology.dcp * topology.block_size * layer.window_bytes
    return total


def check_room(name: str, num_blocks: int, room: int, model: Model, topology: Topology) -> None:
    """Refuse a pool of num_blocks block ids, the null block included, that takes more than room bytes: InputError."""
    each = block_bytes(model, topology)
    if num_blocks * each > room:
        raise InputError(
            f"{name}: a pool of {num_blocks:,} KV blocks (up to the highest block id) takes {_gib(num_blocks * each)} "
            f"of caches on each rank, and there is room for {room // each:,} blocks ({_gib(room)}): run "
            "shorter sequences or fewer of them, or name blocks by small ids"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
