"""What is run of a model: one layer of each variant of a kind, perhaps with fewer heads."""

from dataclasses import replace

from cpkit.errors import ConfigError
from cpkit.layers import RUN_KINDS, Layer
from cpkit.model import Model


def run_model(model: Model, kind: str | None, num_heads: int | None) -> Model:
    """The model of a run. GLM-5.2, kind dsa: a layer with an indexer, then one that shares its selection.

    kind: one of RUN_KINDS; None: the first of them that the model has. num_heads: attention heads over all TP ranks,
    and at most as many index heads; None: the model's. Raises ConfigError.
    """
    kinds = [one for one in RUN_KINDS if any(layer.kind == one for layer in model.layers)]
    if kind is None and kinds:
        kind = kinds[0]
    layers = tuple(layer for layer in model.layers if layer.kind == kind)
    if not layers:
        raise ConfigError(f"{model.name} has no {kind or 'layer that can be run'}: it has {', '.join(kinds) or 'none'}")
    if num_heads is None:
        return replace(model, layers=layers)
    if num_heads < 1:
        raise ConfigError(f"{num_heads} heads: at least 1")
    return replace(model, layers=tuple(_with_heads(layer, num_heads) for layer in layers), num_heads=num_heads)


def _with_heads(layer: Layer, num_heads: int) -> Layer:
    if layer.index is None:
        return layer
    return replace(layer, index=replace(layer.index, num_heads=min(layer.index.num_heads, num_heads)))
