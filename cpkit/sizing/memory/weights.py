"""Weights of one rank, estimated from the sizes in a model's config.

    experts           over all dp * pcp * tp ranks of a pipeline stage
    heads, dense and shared MLPs, embeddings     over tp
    low-rank inputs (q_a, kv_a), indexer, router      on every rank

Norms, biases, scales, compressors and draft layers are left out; they are below 1 per cent but for the draft layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cpkit.errors import ConfigError
from cpkit.sizing.figures import Figure
from cpkit.topology import Topology

DTYPE_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of a parameter; fp4 with an e4m3 scale for 16 of them."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a model by who holds them: split over all ranks of a stage, over tp, or repeated."""

    experts: int
    split: int
    repeated: int
    embeddings: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.experts + self.split + self.repeated + self.embeddings


def count_parameters(config: dict[str, Any], name: str) -> Parameters:
    """Parameters from the fields of a published config; raises ConfigError naming a field that is missing."""

    def size(field: str, default: int | None = None) -> int:
        value = config.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(
                f"{name}: {field}={value!r} in the config: weights cannot be estimated; give --weights-gib"
            )
        return value

    layers, hidden = size("num_hidden_layers"), size("hidden_size")
    expert = 3 * hidden * size("moe_intermediate_size")
    dense_layers = size("first_k_dense_replace", 0)
    moe_layers = layers - dense_layers
    dense = dense_layers * 3 * hidden * size("intermediate_size") if dense_layers else 0
    split, repeated = _attention(config, size)
    index = size("index_n_heads", 0) * size("index_head_dim", 0) * size("q_lora_rank")
    return Parameters(
        experts=moe_layers * size("n_routed_experts") * expert,
        split=split + dense + moe_layers * size("n_shared_experts", 0) * expert,
        repeated=repeated + layers * index + moe_layers * hidden * size("n_routed_experts"),
        embeddings=2 * size("vocab_size") * hidden,
    )


def _attention(config: dict[str, Any], size: Callable[..., int]) -> tuple[int, int]:
    """Parameters of all attention layers: those split by heads, and those that every rank repeats."""
    layers, hidden, heads, rank = (
        size(field) for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "q_lora_rank")
    )
    if "kv_lora_rank" not in config:  # one latent of head_dim is key and value; outputs go through o_lora_rank
        dim, out = size("head_dim"), size("o_lora_rank")
        by_head = heads * dim * (rank + out) + size("o_groups") * out * hidden
        return layers * by_head, layers * hidden * (rank + dim)
    latent, rope, nope, value = (
        size(field) for field in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    by_head = heads * (rank * (nope + rope) + latent * (nope + value) + value * hidden)
    linear = layers - layers // 4 if "linear_num_heads" in config else 0
    wide = 5 * hidden * size("linear_num_heads", 0) * size("linear_head_dim", 0)  # q, k, v, gate, output
    return (layers - linear) * by_head + linear * wide, (layers - linear) * hidden * (rank + latent + rope)


def estimate_weights(config: dict[str, Any], name: str, topology: Topology, dtype: str | None = None) -> Figure:
    """Bytes of one rank's weights. dtype: bf16, fp8 or fp4; None: the config's, else fp8. Embeddings are bf16."""
    if dtype not in (None, *DTYPE_BYTES):
        raise ConfigError(f"weight dtype {dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
    counts = count_parameters(config, name)
    dense = DTYPE_BYTES[dtype or "fp8"]
    fp4_experts = dtype is None and config.get("expert_dtype") == "fp4"
    stage = topology.dp * topology.pcp * topology.tp
    experts = counts.experts * (DTYPE_BYTES["fp4"] if fp4_experts else dense) / stage
    rest = counts.split * dense / topology.tp + counts.repeated * dense + counts.embeddings * 2 / topology.tp
    stated = dtype or ("fp8, experts fp4 (config)" if fp4_experts else "fp8")
    return Figure(
        (experts + rest) / topology.pp,
        "assumed",
        f"{counts.total / 1e9:,.0f} G parameters counted from the config, {stated}, embeddings bf16; experts over "
        f"{stage} ranks, the rest over tp={topology.tp}" + (f", pp={topology.pp}" if topology.pp > 1 else ""),
    )
