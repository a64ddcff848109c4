"""Weights of a model by what is done with them, counted from its config: the part of a layer that no plan describes.

    replicated    applied by every TP rank to all its tokens: down-projections, the indexer's, norms left out
    split         attention heads over TP: up-projections, absorbed key and value projections, output
    dense, expert feed-forward weights; experts lie over all ranks of a replica, a dense or shared part over TP

V3.2 and GLM (one latent, absorbed heads), per layer and head:  q_lora x (nope + rope) + nope x latent + latent x v +
v x hidden. V4 (K = V, no absorption):  q_lora x head + head x o_lora, and one o_groups x o_lora x hidden for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpkit.errors import ConfigError
from cpkit.layers import Layer
from cpkit.model import Model, load_config, published_fields
from cpkit.sizing.figures import Figure

FP4_BYTES = 0.5625
"""Bytes of an fp4 weight with its share of an 8-bit scale for 16 values."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of one attention layer of a kind.

    replicated: on every TP rank. queries, output: over all heads, before the attention and behind it.
    """

    replicated: int
    queries: int
    output: int


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Counts of weights; bytes of a weight are the deployment's choice.

    attention: by kind of layer, in model.layers' order. num_dense, num_moe: layers with a dense feed-forward and with
    experts. dense: weights of one dense feed-forward. expert: of one expert. num_experts, active: routed experts of a
    layer and how many a token takes. shared: of the part every token takes, the router included. head: of the output
    head, and again of the embedding. streams: residual rows a token carries (hyper-connections). weight_bytes,
    expert_bytes: bytes of one weight.
    """

    attention: tuple[AttentionWeights, ...]
    num_dense: int
    num_moe: int
    dense: int
    expert: int
    num_experts: int
    active: int
    shared: int
    head: int
    streams: int
    weight_bytes: Figure
    expert_bytes: Figure


def load_weights(name_or_path: str | Path, model: Model, *, weight_bits: int | None = None) -> ModelWeights:
    """Weights of a shipped model, or of a config.json, whose Model was read from the same place.

    Raises ConfigError for a field that is missing, and for weights quantized otherwise than to fp8 where weight_bits
    does not say to what.
    weight_bits: of experts' weights, and where at least 8 of all: 16, 8 or 4; None: as the config says, else 8.
    """
    facts = published_fields(*load_config(name_or_path))
    if weight_bits not in (None, 4, 8, 16):
        raise ConfigError(f"weights of {weight_bits} bits: 16, 8 or 4")
    hidden = model.hidden_size
    num_experts = _number(facts, "n_routed_experts", 0)
    first_dense = min(_number(facts, "first_k_dense_replace", 0), model.num_layers)
    inner = _number(facts, "moe_intermediate_size") if num_experts else 0
    num_moe = model.num_layers - first_dense if num_experts else 0
    weight, expert = _weight_bytes(facts, weight_bits)
    return ModelWeights(
        attention=tuple(_attention(layer, facts, hidden, model.num_heads) for layer in model.layers),
        num_dense=model.num_layers - num_moe,
        num_moe=num_moe,
        dense=3 * hidden * _number(facts, "intermediate_size", inner if num_experts else None),
        expert=3 * hidden * inner,
        num_experts=num_experts,
        active=_number(facts, "num_experts_per_tok") if num_experts else 0,
        shared=_number(facts, "n_shared_experts", 0) * 3 * hidden * inner + hidden * num_experts,
        head=hidden * _number(facts, "vocab_size"),
        streams=_number(facts, "hc_mult", 1),
        weight_bytes=weight,
        expert_bytes=expert,
    )


def _attention(layer: Layer, facts: Mapping[str, Any], hidden: int, heads: int) -> AttentionWeights:
    if layer.kind == "linear":
        each = hidden * _number(facts, "linear_num_heads") * _number(facts, "linear_head_dim")
        return AttentionWeights(0, 3 * each, each)
    q_lora = _number(facts, "q_lora_rank", hidden)
    index = _index(layer, q_lora, hidden)
    if "kv_lora_rank" in facts:
        latent, rope = _number(facts, "kv_lora_rank"), _number(facts, "qk_rope_head_dim", 0)
        nope, value = _number(facts, "qk_nope_head_dim"), _number(facts, "v_head_dim")
        return AttentionWeights(
            replicated=hidden * (q_lora + latent + rope) + index,
            queries=heads * (q_lora * (nope + rope) + nope * latent),
            output=heads * (latent * value + value * hidden),
        )
    head, o_lora = _number(facts, "head_dim"), _number(facts, "o_lora_rank")
    # a state of ratio 4 is made from two overlapping runs of tokens; keys and their weights are projected alike
    made = hidden * head * (0 if layer.compress_ratio <= 1 else 4 if layer.compress_ratio == 4 else 2)
    return AttentionWeights(
        replicated=hidden * (q_lora + head) + made + index,
        queries=heads * head * q_lora,
        output=heads * head * o_lora + _number(facts, "o_groups") * o_lora * hidden,
    )


def _index(layer: Layer, q_lora: int, hidden: int) -> int:
    """The indexer's projections of queries, keys and head weights."""
    if layer.index is None or not layer.runs_index:
        return 0
    made = 4 if layer.index.ratio == 4 and layer.window_size else 1
    return (
        q_lora * layer.index.num_heads * layer.index.head_dim
        + hidden * layer.index.head_dim * made
        + hidden * layer.index.num_heads
    )


def _weight_bytes(facts: Mapping[str, Any], weight_bits: int | None) -> tuple[Figure, Figure]:
    """Bytes of one weight, of all and of experts."""
    if weight_bits is not None:
        all_of_them = Figure(max(weight_bits, 8) / 8, "given", f"{weight_bits}-bit weights")
        return all_of_them, Figure(FP4_BYTES if weight_bits == 4 else weight_bits / 8, "given", all_of_them.source)
    quantized = facts.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
    if method not in (None, "fp8"):
        raise ConfigError(f"quantization by {method!r} in the config: give --weight-bits 16, 8 or 4")
    plain = Figure(
        1.0, *(("counted", "fp8 in the config") if method else ("assumed", "served in fp8, the usual choice"))
    )
    if facts.get("expert_dtype") == "fp4":
        return plain, Figure(FP4_BYTES, "counted", "expert_dtype fp4 in the config")
    return plain, plain


def _number(facts: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A field of the config; without a default it must be there, for a 0 in its place would be a cost of nothing."""
    value = facts.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{field}={value!r} in the config: weights are counted from it; it is a whole number")
    return value
