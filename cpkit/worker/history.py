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
    topology = places.plan.topology
    stored = state_places(
        positions,
        np.full(len(positions), req),
        places.tables,
        compress_ratio=state.layer.compress_ratio,
        states_per_block=state.caches.states_per_block,
        dcp_size=topology.dcp,
        interleave=topology.interleave,
    )
    slots = sharded_state_slots(stored, num_tokens=len(positions), dcp_rank=places.rank.dcp_rank)
    mine = slots >= 0
    keys = source.layer_keys(_ids(places, req, int(mine.sum())), positions[mine], state.layer, number, places.device)
    kept = torch.tensor(slots[mine], device=places.device)
    if keys.latent is not None:
        state.caches.insert_latent(keys.latent, kept)
    if keys.index_key is not None:
        state.caches.insert_index(keys.index_key, kept)


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
