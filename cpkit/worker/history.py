"""What was computed before the first step of a run, written to the caches without computing it again.

A request of 5 computed tokens, dcp=2, interleave=1: rank 0 writes keys 0 2 4, rank 1 keys 1 3; both the newest window.
"""

import numpy as np
import torch

from cpkit.arrays import IntArray
from cpkit.planner.slots import replicated_slots
from cpkit.planner.state_slots import sharded_state_slots, state_places
from cpkit.worker.layer_state import LayerState
from cpkit.worker.places import Places
from cpkit.worker.token_activations import TokenActivations


def write_history(places: Places, states: list[LayerState], source: TokenActivations) -> None:
    """Write the keys that this rank stores of every token computed before the step, in all layers."""
    for req in np.flatnonzero(places.plan.batch.num_computed).tolist():
        positions = np.arange(places.plan.batch.num_computed[req])
        for number, state in enumerate(states):
            if state.layer.compress_ratio:
                _write_sharded(places, state, source, number, req, positions)
            if state.layer.window_size:
                _write_window(places, state, source, number, req, positions[-state.layer.window_size :])


def _write_sharded(
    places: Places, state: LayerState, source: TokenActivations, number: int, req: int, positions: IntArray
) -> None:
    layer, caches = state.layer, state.caches
    latent_slots = _slots(places, req, positions, layer.compress_ratio, caches.states_per_block)
    index_slots = _slots(places, req, positions, layer.chunk_ratio, caches.index_block)
    mine = latent_slots >= 0  # where a pool's last token is stored, the pool is too
    keys = source.layer_keys(_ids(places, req, int(mine.sum())), positions[mine], layer, number, places.device)
    if keys.latent is not None:
        caches.insert_latent(keys.latent, torch.tensor(latent_slots[mine], device=places.device))
    if keys.index_key is not None:
        caches.insert_index(keys.index_key, torch.tensor(index_slots[mine], device=places.device))


def _slots(places: Places, req: int, positions: IntArray, ratio: int, keys_per_block: int) -> IntArray:
    """Slot of the key of `ratio` tokens that each position completes on this rank, -1 for none."""
    topology = places.plan.topology
    stored = state_places(
        positions,
        np.full(len(positions), req),
        places.tables,
        compress_ratio=ratio,
        states_per_block=keys_per_block,
        dcp_size=topology.dcp,
        interleave=topology.interleave,
    )
    return sharded_state_slots(stored, num_tokens=len(positions), dcp_rank=places.rank.dcp_rank)


def _write_window(
    places: Places, state: LayerState, source: TokenActivations, number: int, req: int, positions: IntArray
) -> None:
    block_size = places.plan.topology.block_size
    slots = replicated_slots(positions, np.full(len(positions), req), places.window_tables, block_size=block_size)
    keys = source.layer_keys(_ids(places, req, len(positions)), positions, state.layer, number, places.device)
    assert keys.window is not None, "the layer has a window"
    state.caches.insert_window(keys.window, torch.tensor(slots, device=places.device))


def _ids(places: Places, req: int, count: int) -> IntArray:
    return np.full(count, places.plan.batch.req_ids[req])
