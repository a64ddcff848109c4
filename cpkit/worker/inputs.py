"""What a layer computes from, and how it reaches the caches: own tokens' activations, KV gathered over PCP, writes."""

from dataclasses import dataclass
from typing import Protocol

import torch

from cpkit.comm.base import Comm
from cpkit.layers import Layer
from cpkit.worker.caches import LayerCaches
from cpkit.worker.layer_state import StepMetadata
from cpkit.worker.places import Places


@dataclass(frozen=True, slots=True, eq=False)
class LayerKeys:
    """What some tokens write to a layer's caches, [tokens, dim] bf16 each, None where the layer has no such cache.

    latent, index_key: of the state, or of the pool, that a token completes; NaN beside a token that completes none.
    window: its own.
    """

    latent: torch.Tensor | None
    index_key: torch.Tensor | None
    window: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """Activations of one layer for a rank's own query tokens [n] and own heads [h]; None where the layer has none.

    q: [n, h, dim] bf16. index_q: [n, index heads, head_dim] bf16; index_weights: [n, index heads] fp32, softmax and
    head scales folded in. keys: of the n tokens. sink: [h] fp32.
    """

    q: torch.Tensor
    index_q: torch.Tensor | None
    index_weights: torch.Tensor | None
    keys: LayerKeys
    sink: torch.Tensor | None


class InputSource(Protocol):
    """Gives a rank the activations of its own tokens and heads, without asking any other rank."""

    def layer_inputs(self, places: Places, layer: Layer, number: int) -> LayerInputs:
        """number: of the layer in the model's list."""
        ...

    def hidden(self, places: Places, hidden_size: int) -> torch.Tensor:
        """[own tokens, hidden_size] bf16, what the layers of a step are followed by."""
        ...


def gather_layer_keys(comm: Comm, places: Places, own: LayerKeys) -> LayerKeys:
    """Keys of all PCP ranks, at the places of the gathered layout, from each rank's own."""
    return LayerKeys(
        latent=_gather(comm, places, own.latent, "kv_latent"),
        index_key=_gather(comm, places, own.index_key, "index_key"),
        window=_gather(comm, places, own.window, "swa_row"),
    )


def write_keys(caches: LayerCaches, places: Places, keys: LayerKeys, metadata: StepMetadata) -> None:
    """Write what this rank owns of the whole layout."""
    if metadata.latent_slots is not None and keys.latent is not None:
        caches.insert_latent(keys.latent, metadata.latent_slots)
    if metadata.indexer is not None and keys.index_key is not None:
        caches.insert_index(keys.index_key, metadata.indexer.slot_mapping)
    if keys.window is not None:
        caches.insert_window(keys.window, places.window_writes())


def _gather(comm: Comm, places: Places, own: torch.Tensor | None, what: str) -> torch.Tensor | None:
    """[own tokens, dim] -> [P * padded, dim]; leading tokens that every rank has itself do not travel."""
    num_ranks = places.plan.topology.pcp
    if own is None or num_ranks == 1:
        return own
    known = places.num_known
    sent = own.new_zeros(places.plan.padded - known, own.shape[1])
    sent[: len(own) - known] = own[known:]
    gathered = comm.all_gather(sent, "pcp", what=what).view(num_ranks, -1, own.shape[1])
    return torch.cat([own[:known].expand(num_ranks, -1, -1), gathered], dim=1).flatten(0, 1)
