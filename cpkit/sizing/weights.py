"""Weights of a model, counted from its config: who holds them, what is done with them, and the bytes of one.

    replicated      applied by every TP rank to all its tokens: down-projections, the indexer's; the router
    queries, output attention heads, over TP: up-projections, absorbed key and value projections, output
    dense, expert   feed-forward weights; experts lie over all ranks of a replica, a dense or shared part over TP

V3.2 and GLM (one latent, absorbed heads), per layer and head:  q_lora x (nope + rope) + nope x latent + latent x v +
v x hidden. V4 (K = V, no absorption):  q_lora x head + head x o_lora, and one o_groups x o_lora x hidden for all.
Linear layers (KDA):  q, k, v and output are hidden x heads; decay and output gate pass through one head's width.
Norms, biases, convolutions, scales of blocks and draft layers are left out: below 1 per cent but for the draft layer.

weight bits     experts         the rest        embedding and output head
16              bf16            bf16            bf16
8               fp8             fp8             bf16
4               fp4 and scales  fp8             bf16
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

HEAD_BYTES = 2
"""Bytes of a weight of the embedding and the output head, which stay bf16."""

GIVEN = {
    16: (2.0, 2.0, "16-bit weights"),
    8: (1.0, 1.0, "8-bit weights"),
    4: (1.0, FP4_BYTES, "4-bit experts, 8-bit weights beside them"),
}
"""By weight bits: bytes of a weight, bytes of an expert's, and both in words."""


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
    layer and how many a token takes. shared: of the experts every token takes. router: on every rank. head: of the
    output head, and again of the embedding. streams: residual rows a token carries (hyper-connections). weight_bytes,
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
    router: int
    head: int
    streams: int
    weight_bytes: Figure
    expert_bytes: Figure


def load_weights(name_or_path: str | Path, model: Model, *, weight_bits: int | None = None) -> ModelWeights:
    """Weights of a shipped model, or of a config.json, whose Model was read from the same place; see count_weights."""
    return count_weights(published_fields(*load_config(name_or_path)), model, weight_bits=weight_bits)


def check_bits(weight_bits: int | None) -> None:
    """Refuse bits of a weight that the table above does not have; raises ConfigError."""
    if weight_bits not in (None, *GIVEN):
        raise ConfigError(f"weights of {weight_bits} bits: 16, 8 or 4")


def count_weights(facts: Mapping[str, Any], model: Model, *, weight_bits: int | None = None) -> ModelWeights:
    """Weights counted from the published fields of the model's config.

    Raises ConfigError for a field that is missing, and for weights quantized in a way that is not known here where
    weight_bits does not say to what.
    weight_bits: 16, 8 or 4, as the table above has them; None: as the config says, fp8 where it says nothing.
    """
    check_bits(weight_bits)
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
        shared=_number(facts, "n_shared_experts", 0) * 3 * hidden * inner,
        router=hidden * num_experts,
        head=hidden * _number(facts, "vocab_size"),
        streams=_number(facts, "hc_mult", 1),
        weight_bytes=weight,
        expert_bytes=expert,
    )


def _attention(layer: Layer, facts: Mapping[str, Any], hidden: int, heads: int) -> AttentionWeights:
    if layer.kind == "linear":
        num_heads, dim = _number(facts, "linear_num_heads"), _number(facts, "linear_head_dim")
        wide = num_heads * dim
        return AttentionWeights(
            replicated=2 * hidden * dim,
            queries=3 * hidden * wide + 2 * dim * wide + hidden * num_heads,
            output=wide * hidden,
        )
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
        plain, expert, words = GIVEN[weight_bits]
        return Figure(plain, "given", words), Figure(expert, "given", words)
    plain_bytes = _plain_bytes(facts)
    expert_dtype = facts.get("expert_dtype")
    if expert_dtype is None:
        return plain_bytes, plain_bytes
    if expert_dtype != "fp4":
        raise _not_known(f"expert_dtype={expert_dtype!r}")
    return plain_bytes, Figure(FP4_BYTES, "counted", "experts fp4 in the config")


def _plain_bytes(facts: Mapping[str, Any]) -> Figure:
    """Bytes of one weight beside experts' as the config says it: its quantization, else its dtype."""
    quantized = facts.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        if method != "fp8":
            raise _not_known(f"quantization by {method!r}")
        return Figure(1.0, "counted", "fp8 in the config")
    dtype = facts.get("dtype", facts.get("torch_dtype"))
    if dtype is None:
        return Figure(1.0, "assumed", "served in fp8, the usual choice")
    if dtype not in ("bfloat16", "float16"):
        raise _not_known(f"dtype {dtype!r}")
    return Figure(2.0, "counted", f"{dtype} in the config")


def _not_known(what: str) -> ConfigError:
    return ConfigError(f"{what} in the config: bytes of its weights are not known here; give --weight-bits 16, 8 or 4")


def _number(facts: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A field of the config; without a default it must be there, for a 0 in its place would be a cost of nothing."""
    value = facts.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{field}={value!r} in the config: weights are counted from it; it is a whole number")
    return value
