"""A rank's activations, made or read for its own tokens and heads alone."""

from dataclasses import dataclass

import torch

from cpkit.activations.content import Content
from cpkit.activations.generate import Activations
from cpkit.arrays import IntArray
from cpkit.layers import Layer
from cpkit.worker.inputs import LayerInputs, LayerKeys
from cpkit.worker.places import Places


@dataclass(frozen=True, slots=True, eq=False)
class TokenActivations:
    """Activations by the names of tokens: equal tokens have equal ones, whoever asks. num_heads: over all TP ranks.

    A state's or pool's vector is keyed by its own index and by the name of its last token. Sinks are one value a head
    and layer.
    """

    activations: Activations
    content: Content
    num_heads: int

    def layer_inputs(self, places: Places, layer: Layer, number: int) -> LayerInputs:
        """What a rank's own query tokens bring into a layer."""
        req_ids = places.plan.batch.req_ids[places.req]
        names, position = self._tokens(req_ids, places.position, places.device)
        topology = places.plan.topology
        own = self.num_heads // topology.tp
        first = topology.coords(places.rank.rank).tp * own
        heads = range(first, first + own)
        make, token = self.activations, (number, names, position)
        index = layer.index if layer.runs_index else None
        return LayerInputs(
            q=make.heads("query", *token, layer.key_dim or layer.window_dim, heads),
            index_q=make.heads("index_query", *token, index.head_dim, range(index.num_heads)) if index else None,
            index_weights=make.rows("index_weights", *token, index.num_heads) if index else None,
            keys=self.layer_keys(req_ids, places.position, layer, number, places.device),
            sink=self.sink(number, heads, places.device) if layer.window_size else None,
        )

    def layer_keys(
        self, req_ids: IntArray, positions: IntArray, layer: Layer, number: int, device: torch.device
    ) -> LayerKeys:
        """What tokens write to a layer's caches; req_ids, positions: [n] int64."""
        names, position = self._tokens(req_ids, positions, device)
        latent = index_key = window = None
        if layer.compress_ratio:
            latent = self._states("latent", number, names, position, layer.compress_ratio, layer.key_dim)
            if layer.index and layer.runs_index:
                index = layer.index
                index_key = self._states("index_key", number, names, position, index.ratio, index.head_dim)
        if layer.window_size:
            window = self.activations.rows("window", number, names, position, layer.window_dim)
        return LayerKeys(latent, index_key, window)

    def hidden(self, places: Places, hidden_size: int) -> torch.Tensor:
        """[own tokens, hidden_size] bf16: what follows attention, and is no part of a run."""
        req_ids = places.plan.batch.req_ids[places.req]
        return self.activations.rows("hidden", 0, *self._tokens(req_ids, places.position, places.device), hidden_size)

    def sink(self, number: int, heads: range, device: torch.device) -> torch.Tensor:
        """[heads] fp32."""
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        whole = self.activations.rows("sink", number, zero, zero, self.num_heads)
        return whole[0, heads.start : heads.stop].float()

    def _tokens(
        self, req_ids: IntArray, positions: IntArray, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        names = self.content.names(req_ids, positions)
        return torch.tensor(names, device=device), torch.tensor(positions, device=device)

    def _states(
        self, stream: str, number: int, names: torch.Tensor, position: torch.Tensor, ratio: int, dim: int
    ) -> torch.Tensor:
        """[tokens, dim], keys of `ratio` tokens beside the tokens that complete them, NaN beside all others."""
        completes = (position + 1) % ratio == 0
        keys = self.activations.rows(stream, number, names[completes], position[completes] // ratio, dim)
        out = keys.new_full((len(completes), dim), float("nan"))
        out[completes] = keys
        return out
