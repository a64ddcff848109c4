"""Memory of a deployment, and what each knob changes of it."""

from dataclasses import replace

import pytest

from cpkit.errors import ConfigError
from cpkit.model import load_config, load_model, published_fields
from cpkit.sizing.chips import chip
from cpkit.sizing.deployment import Deployment
from cpkit.sizing.figures import Figure
from cpkit.sizing.memory.deployment import Limits, knobs, memory_of, with_cache_dtype
from cpkit.sizing.rules.defaults import complete


def limits(name="deepseek-v3.2", **changes):
    return Limits(
        published_fields(*load_config(name)), max_model_len=65_536, weights=Figure(8e10, "given", "test"), **changes
    )


def deployment(engine="vllm", name="deepseek-v3.2", **settings):
    return Deployment(engine=engine, model=load_model(name), chip=chip("h200"), **{"tp": 8, **settings})


@pytest.mark.parametrize(
    ("engine", "token_bytes"),
    [
        pytest.param("vllm", 61 * (656 + 132) / 8, id="vllm-shards-both"),
        pytest.param("sglang", 61 * (656 / 8 + 132), id="sglang-replicates-the-index"),
        pytest.param("cpkit", 61 * (656 + 132) / 8, id="cpkit-shards-both"),
    ],
)
def test_engines_keep_indexer_keys_differently(engine, token_bytes):
    assert memory_of(deployment(engine, dcp=8), limits()).token_bytes == pytest.approx(token_bytes)


@pytest.mark.parametrize(
    ("dtype", "row"), [("fp8_ds_mla", 656), ("fp8_e4m3", 656), ("bf16", (512 + 64) * 2), ("nvfp4_ds_mla", 352)]
)
def test_rows_of_another_cache(dtype, row):
    (layer,) = with_cache_dtype(load_model("deepseek-v3.2"), dtype).layers
    assert layer.key_bytes == row and layer.index.key_bytes == 132


@pytest.mark.parametrize(
    ("backend", "dtype", "row"),
    [("trtllm", "fp8_e4m3", 576), ("flashmla-kv", "fp8_e4m3", 656), ("trtllm", "bf16", 1152)],
)
def test_trtllms_fp8_rows_have_no_scales(backend, dtype, row):
    """SGLang's own count for GLM-5.2 is 47,702 bytes a token: 78 x 576 + 21 x 132."""
    asked = replace(deployment("sglang", "glm-5.2"), attention_backend=backend, kv_cache_dtype=dtype)
    assert memory_of(asked, limits("glm-5.2")).token_bytes == 78 * row + 21 * 132


@pytest.mark.parametrize(
    ("engine", "speculation", "dcp", "kept"),
    [
        pytest.param("vllm", None, 4, 0, id="no-drafts"),
        pytest.param("vllm", "mtp", 1, 788, id="mtp"),
        pytest.param("vllm", "mtp", 4, 788 / 4, id="mtp-sharded"),
        pytest.param("sglang", "mtp", 4, 788, id="sglang-replicates-its-drafts"),
        pytest.param("sglang", "eagle", 4, 788, id="sglang-eagle"),
        pytest.param("vllm", "eagle", 4, 0, id="a-model-that-is-not-known"),
        pytest.param("vllm", "ngram", 4, 0, id="no-model"),
    ],
)
def test_a_draft_module_is_one_more_layer_of_keys(engine, speculation, dcp, kept):
    plain, drafting = (
        memory_of(replace(deployment(engine, dcp=dcp), speculation=word), limits()) for word in (None, speculation)
    )
    assert drafting.token_bytes - plain.token_bytes == pytest.approx(kept)
    assert [row.kind for row in drafting.rows[len(plain.rows) :]] == (["draft"] if kept else [])


def test_windows_have_rows_too():
    layer = with_cache_dtype(load_model("deepseek-v4-pro"), "bf16").layers[0]
    assert layer.key_bytes == layer.window_bytes == 1024


def test_limits_reach_the_plan():
    memory = memory_of(deployment(), limits(workspace_tokens=1000, budget={"max_num_seqs": 3}))
    buffers = {buffer.name: buffer.bytes for buffer in memory.buffers}
    assert buffers["index workspace"] == 132_000 and buffers["decode logits"] == 3 * 65_536 * 4
    assert memory.settings.budget.max_num_batched_tokens == 8192


def test_cpkit_fills_one_workspace_while_it_scores_another():
    """vLLM has one, whose keys are scored before the next are gathered."""
    for engine, count in (("vllm", 1), ("cpkit", 2)):
        memory = memory_of(deployment(engine), limits(workspace_tokens=1000))
        assert {buffer.name: buffer.bytes for buffer in memory.buffers}["index workspace"] == count * 132_000


def test_buffers_of_sglang_lie_beside_its_static_share():
    memory = memory_of(deployment("sglang", dcp=8), limits())
    assert memory.room == pytest.approx(141e9 * 0.9 - 8e10) and sum(buffer.bytes for buffer in memory.buffers) > 1e9
    with pytest.raises(ConfigError, match=r"buffers do not fit the 1.3 GiB of h200 that the share 0.99 of weights"):
        memory_of(deployment("sglang", dcp=8), limits(utilization=Figure(0.99, "given", "test")))


def test_no_chip_no_memory():
    with pytest.raises(ConfigError, match="memory needs a chip: give --chip"):
        memory_of(replace(deployment(), chip=None), limits())


def test_each_knob_is_turned_alone():
    asked = deployment(dcp=4, attention_backend="flashmla-sparse")
    base = memory_of(asked, limits())
    found = {(knob.name, knob.setting): knob for knob in knobs(asked, limits())}
    assert found["dcp", "2"].memory.token_bytes == 2 * base.token_bytes and not found["dcp", "2"].but
    assert found["dcp", "8"].but == "refused: vllm-flashmla-padding"
    assert found["pcp", "2 (dcp 2)"].memory.token_bytes == 2 * base.token_bytes
    assert found["index cache", "replicated"].memory.token_bytes == pytest.approx(61 * (656 / 4 + 132))
    assert found["interleave", "64"].memory.tokens == base.tokens
    workspace = {buffer.name: buffer.bytes for buffer in found["workspace", "half"].memory.buffers}
    assert workspace["index workspace"] * 2 == 40 * 65_536 * 132
    assert found["max num seqs", "half"].memory.settings.budget.max_num_seqs == 128
    assert all(knob.memory.tokens >= base.tokens for knob in found.values() if knob.setting == "half")


def test_a_knob_that_leaves_no_room_says_so():
    """2 GB are left for keys with dcp 1; the buffers of dcp 8 are larger by more than that."""
    asked = deployment(engine="cpkit")
    held = sum(buffer.bytes for buffer in memory_of(asked, limits()).buffers)
    tight = limits(utilization=Figure((8e10 + held + 2e9) / 141e9, "given", "test"))
    found = {(knob.name, knob.setting): knob for knob in knobs(asked, tight)}
    assert found["dcp", "2"].memory and not found["dcp", "2"].but
    assert found["dcp", "8"].memory is None and found["dcp", "8"].but.startswith("no room for KV on h200")


@pytest.mark.parametrize(
    ("engine", "on", "given", "expected"),
    [
        pytest.param("vllm", None, {}, {"attention_backend": "flashmla-sparse", "block_size": 64}, id="vllm"),
        pytest.param("vllm", "mi300x", {}, {"attention_backend": "rocm-aiter-mla-sparse"}, id="vllm-amd"),
        pytest.param("sglang", "b200", {}, {"attention_backend": "trtllm", "kv_cache_dtype": "fp8_e4m3"}, id="sglang"),
        pytest.param(
            "sglang", "h200", {"attention_backend": "nsa"}, {"attention_backend": "flashmla-sparse"}, id="nsa"
        ),
        pytest.param("cpkit", None, {}, {"attention_backend": None}, id="cpkit"),
        pytest.param("vllm", None, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_ds_mla"}, id="fp8"),
        pytest.param("vllm", None, {"kv_cache_dtype": "bf16"}, {"kv_cache_dtype": "bf16"}, id="given-stays"),
        pytest.param(
            "vllm", None, {"tp": 8, "dcp": 8, "kv_transfer": "nixl"}, {"interleave": 64}, id="nixl-sets-the-interleave"
        ),
    ],
)
def test_what_is_chosen_is_told(engine, on, given, expected):
    found, assumed = complete(engine, load_model("glm-5"), chip(on) if on else None, given)
    for name, value in expected.items():
        assert getattr(found, name) == value
        chosen = value is not None and given.get(name) != value
        assert any(text.startswith(f"{name.replace('_', '-')} {value}: ") for text in assumed) == chosen


@pytest.mark.parametrize(
    ("engine", "name", "block_size"),
    [
        pytest.param("vllm", "deepseek-v4-flash", 256, id="compressed"),
        pytest.param("sglang", "glm-5.3-flash", 1024, id="pools-of-sglang"),
        pytest.param("vllm", "glm-5.3-flash", 64, id="pools-of-vllm"),
    ],
)
def test_blocks_follow_the_model(engine, name, block_size):
    found, _ = complete(engine, load_model(name), None, {})
    assert found.block_size == block_size
