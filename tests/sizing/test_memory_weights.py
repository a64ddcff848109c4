"""Weights: parameters that models are known to have, and who holds them."""

import pytest

from cpkit.errors import ConfigError
from cpkit.model import load_config, published_fields
from cpkit.sizing.memory.weights import count_parameters, estimate_weights
from cpkit.topology import Topology


def config(name):
    return published_fields(*load_config(name))


SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 10,
    "num_attention_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 3,
    "v_head_dim": 7,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "first_k_dense_replace": 1,
    "intermediate_size": 11,
    "moe_intermediate_size": 9,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "vocab_size": 100,
}


def matrices():
    """Every matrix of SMALL by who holds it, as (rows, columns)."""
    experts = [(10, 9)] * 3 * 16 * 2
    split = [(6, 4 * (3 + 2)), (5, 4 * (3 + 7)), (4 * 7, 10)] * 3 + [(10, 11)] * 3 + [(10, 9)] * 3 * 2
    repeated = [(10, 6), (10, 5 + 2), (6, 2 * 8)] * 3 + [(10, 16)] * 2
    return experts, split, repeated, [(100, 10)] * 2


def size(shapes):
    return sum(rows * columns for rows, columns in shapes)


def test_parameters_matrix_by_matrix():
    found = count_parameters(SMALL, "small")
    assert (found.experts, found.split, found.repeated, found.embeddings) == tuple(map(size, matrices()))


@pytest.mark.parametrize(("dtype", "each"), [("bf16", 2), ("fp8", 1), ("fp4", 9 / 16), (None, 1)])
def test_bytes_of_a_rank(dtype, each):
    experts, split, repeated, embeddings = map(size, matrices())
    found = estimate_weights(SMALL, "small", Topology(pp=3, pcp=2, tp=4, dcp=8), dtype)
    expected = (experts * each / 8 + split * each / 4 + repeated * each + 2 * embeddings / 4) / 3
    assert found.value == pytest.approx(expected) and found.kind == "assumed"
    assert (dtype or "fp8") in found.source and "experts over 8 ranks" in found.source


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
    assert count_parameters(config(name), name).total / 1e9 == pytest.approx(giga, rel=0.02)


def test_experts_of_v4_are_fp4():
    found = estimate_weights(config("deepseek-v4-flash"), "v4", Topology(tp=8))
    assert "experts fp4 (config)" in found.source and found.value < 284e9 / 8


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        pytest.param(
            {"vocab_size": None}, None, "small: vocab_size=None in the config: .* give --weights-gib", id="field"
        ),
        pytest.param({}, "int3", "weight dtype 'int3': use one of bf16, fp8, fp4", id="dtype"),
    ],
)
def test_what_cannot_be_estimated_is_refused(changes, dtype, reason):
    with pytest.raises(ConfigError, match=reason):
        estimate_weights({**SMALL, **changes}, "small", Topology(), dtype)
