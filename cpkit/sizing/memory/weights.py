"""Bytes of one rank's weights.

experts                                         over all dp * pcp * tp ranks of a pipeline stage
heads, dense and shared MLPs, embeddings        over tp
low-rank inputs, indexer, compressors, router   on every rank
"""

from collections.abc import Mapping
from typing import Any

from cpkit.errors import ConfigError
from cpkit.model import Model
from cpkit.sizing.figures import Figure
from cpkit.sizing.weights import HEAD_BYTES, count_weights
from cpkit.topology import Topology


def estimate_weights(
    config: Mapping[str, Any], model: Model, topology: Topology, weight_bits: int | None = None
) -> Figure:
    """Bytes of one rank's weights. config, weight_bits: as count_weights takes them; raises ConfigError as it does."""
    try:
        weights = count_weights(config, model, weight_bits=weight_bits)
    except ConfigError as error:
        raise ConfigError(f"{model.name}: {error}; or state a rank's weights, --weights-gib") from error
    attention = list(zip(model.layers, weights.attention, strict=True))
    experts = weights.num_moe * weights.num_experts * weights.expert
    split = sum(layer.num_layers * (each.queries + each.output) for layer, each in attention)
    split += weights.num_dense * weights.dense + weights.num_moe * weights.shared
    repeated = sum(layer.num_layers * each.replicated for layer, each in attention) + weights.num_moe * weights.router
    embeddings = 2 * weights.head
    stage = topology.dp * topology.pcp * topology.tp
    size = weights.weight_bytes.value
    num_bytes = experts * weights.expert_bytes.value / stage + split * size / topology.tp + repeated * size
    num_bytes += embeddings * HEAD_BYTES / topology.tp
    stored = dict.fromkeys((weights.weight_bytes.source, weights.expert_bytes.source))
    return Figure(
        num_bytes / topology.pp,
        "assumed",
        f"{(experts + split + repeated + embeddings) / 1e9:,.0f} G parameters counted from the config, "
        f"{', '.join(stored)}, embeddings bf16; experts over {stage} ranks, the rest over tp={topology.tp}"
        + (f", pp={topology.pp}" if topology.pp > 1 else ""),
    )
