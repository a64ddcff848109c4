"""Weights of a rank: every matrix of small models, who holds it, and the bytes it is stored in."""

import pytest

from cpkit.errors import ConfigError
from cpkit.model import load_config, load_model, model_from_config, published_fields
from cpkit.sizing.memory.weights import estimate_weights
from cpkit.sizing.weights import count_weights
from cpkit.topology import Topology

V32 = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 3,
    "hidden_size": 10,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 3,
    "v_head_dim": 7,
    "index_topk": 16,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "indexer_types": ["full", "shared", "full"],
    "first_k_dense_replace": 1,
    "intermediate_size": 11,
    "moe_intermediate_size": 9,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
}
LINEAR = {
    **V32,
    "model_type": "glm5_next",
    "num_hidden_layers": 4,
    "first_k_dense_replace": 0,
    "index_kpool": 4,
    "indexer_types": None,
    "linear_num_heads": 3,
    "linear_head_dim": 5,
}


def feed_forward(dense, moe):
    """Experts, split and repeated matrices as (rows, columns), of so many layers of each sort."""
    return [(10, 9)] * 3 * 16 * moe, [(10, 11)] * 3 * dense + [(10, 9)] * 3 * moe, [(10, 16)] * moe


def latent(layers, indexers):
    """Split and repeated matrices of latent attention."""
    split = [(6, 4 * (3 + 64)), (512, 4 * (3 + 7)), (4 * 7, 10)] * layers
    return split, [(10, 6), (10, 512 + 64)] * layers + [(6, 2 * 8), (10, 8), (10, 2)] * indexers


def v32():
    experts, split, repeated = feed_forward(dense=1, moe=2)
    heads, low = latent(layers=3, indexers=2)
    return experts, split + heads, repeated + low


def linear():
    """Three KDA layers of 3 heads of 5: q, k, v; decay and gate through 5 values; beta; output."""
    experts, split, repeated = feed_forward(dense=0, moe=4)
    heads, low = latent(layers=1, indexers=1)
    by_head = [(10, 15)] * 3 + [(5, 15)] * 2 + [(10, 3), (15, 10)]
    return experts, split + heads + by_head * 3, repeated + low + [(10, 5)] * 2 * 3


def size(shapes):
    return sum(rows * columns for rows, columns in shapes)


@pytest.mark.parametrize("bits", [16, 8, 4, None])
@pytest.mark.parametrize(("config", "matrices"), [(V32, v32), (LINEAR, linear)], ids=["latent", "linear"])
def test_bytes_of_a_rank_matrix_by_matrix(config, matrices, bits):
    experts, split, repeated = map(size, matrices())
    each, expert = {16: (2, 2), 8: (1, 1), 4: (1, 9 / 16), None: (1, 1)}[bits]
    found = estimate_weights(config, model_from_config(config, "small"), Topology(pp=3, pcp=2, tp=4, dcp=8), bits)
    embeddings = 2 * 100 * 10
    expected = (experts * expert / 8 + split * each / 4 + repeated * each + 2 * embeddings / 4) / 3
    assert found.value == pytest.approx(expected) and found.kind == "assumed"
    assert "experts over 8 ranks" in found.source


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.3-flash", "deepseek-v4-flash"])
@pytest.mark.parametrize("bits", [None, 4, 8, 16])
def test_memory_and_time_have_the_same_weights(name, bits):
    """On one rank, memory is what the cost model's weights weigh."""
    model, config = load_model(name), published_fields(*load_config(name))
    weights = count_weights(config, model, weight_bits=bits)
    attention = zip(model.layers, weights.attention, strict=True)
    plain = sum(kind.num_layers * (it.replicated + it.queries + it.output) for kind, it in attention)
    plain += weights.num_dense * weights.dense + weights.num_moe * (weights.shared + weights.router)
    experts = weights.num_moe * weights.num_experts * weights.expert
    total = plain * weights.weight_bytes.value + experts * weights.expert_bytes.value + 2 * 2 * weights.head
    assert estimate_weights(config, model, Topology(), bits).value == pytest.approx(total)


@pytest.mark.parametrize(
    ("name", "giga"),
    [
        pytest.param("deepseek-v3.2", 671, id="published-671B"),
        pytest.param("glm-5", 744, id="published-744B"),
        pytest.param("deepseek-v4-flash", 284, id="published-284B"),
        pytest.param("deepseek-v4-pro", 1600, id="published-1.6T"),
    ],
)
def test_totals_of_known_models(name, giga):
    """In bf16 a parameter is 2 bytes wherever it is."""
    found = estimate_weights(published_fields(*load_config(name)), load_model(name), Topology(), 16)
    assert found.value / 2e9 == pytest.approx(giga, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "each", "expert", "said"),
    [
        pytest.param({}, 1, 1, "served in fp8, the usual choice", id="nothing-said"),
        pytest.param({"quantization_config": {"quant_method": "fp8"}}, 1, 1, "fp8 in the config", id="fp8"),
        pytest.param({"torch_dtype": "bfloat16"}, 2, 2, "bfloat16 in the config", id="bf16"),
        pytest.param({"dtype": "bfloat16", "quantization_config": "fp8"}, 1, 1, "fp8 in the config", id="fp8-of-bf16"),
        pytest.param({"expert_dtype": "fp4"}, 1, 9 / 16, "experts fp4 in the config", id="fp4-experts"),
    ],
)
def test_the_config_says_what_weights_are_stored_in(changes, each, expert, said):
    config = {**V32, **changes}
    model = model_from_config(config, "small")
    weights = count_weights(config, model)
    assert (weights.weight_bytes.value, weights.expert_bytes.value) == (each, expert)
    assert said in estimate_weights(config, model, Topology()).source


def test_what_is_said_beside_the_text_model_holds_for_it():
    whole = {"model_type": "deepseek_v32", "text_config": V32, "quantization_config": {"quant_method": "fp8"}}
    assert published_fields(whole, "small") == {**V32, "quantization_config": {"quant_method": "fp8"}}
    inner = {"text_config": {**V32, "dtype": "float16"}, "dtype": "bfloat16"}
    assert published_fields(inner, "small")["dtype"] == "float16"


@pytest.mark.parametrize(
    ("changes", "bits", "reason"),
    [
        pytest.param({"vocab_size": None}, None, "small: vocab_size=None in the config: .* --weights-gib", id="field"),
        pytest.param({"quantization_config": {"quant_method": "awq"}}, None, "by 'awq' .* --weight-bits", id="awq"),
        pytest.param(
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            None,
            "by 'modelopt' .* --weight-bits 16, 8 or 4; .* --weights-gib",
            id="nvfp4",
        ),
        pytest.param({"quantization_config": {}}, None, "by None in the config", id="method-not-said"),
        pytest.param({"expert_dtype": "int3"}, None, "expert_dtype='int3' in the config", id="expert-dtype"),
        pytest.param({"torch_dtype": "float32"}, None, "dtype 'float32' in the config", id="dtype"),
        pytest.param({}, 3, "weights of 3 bits: 16, 8 or 4", id="bits"),
    ],
)
def test_what_cannot_be_estimated_is_refused(changes, bits, reason):
    config = {**V32, **changes}
    with pytest.raises(ConfigError, match=reason):
        estimate_weights(config, model_from_config(V32, "small"), Topology(), bits)
