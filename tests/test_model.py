"""Facts of the shipped models, configs that are read, and worlds that a model cannot run in."""

import json
import math
from pathlib import Path

import pytest

from cpkit.errors import ConfigError, InputError
from cpkit.layers import Index, Layer
from cpkit.model import MODELS, Model, load_model, model_from_config
from cpkit.topology import Topology

FACTS = Path(__file__).parent.parent / "cpkit" / "data" / "models"


def config_of(name):
    """The config of a shipped model, as its publisher writes it."""
    facts = json.loads((FACTS / f"{name}.json").read_text(encoding="utf-8"))
    return facts.get("config", facts)


@pytest.mark.parametrize(
    ("name", "layers", "heads", "ratios", "kv_bytes"),
    [
        pytest.param("deepseek-v3.2", 61, 128, (1,), 61 * 788, id="v3.2"),
        pytest.param("deepseek-v4-flash", 43, 64, (4, 128), 21 * (584 + 132) / 4 + 20 * 584 / 128, id="v4-flash"),
        pytest.param("deepseek-v4-pro", 61, 128, (4, 128), 30 * (584 + 132) / 4 + 31 * 584 / 128, id="v4-pro"),
        pytest.param("deepseek-v4.1-flash", 40, 64, (1, 2), 660 + 3 * 660 / 2, id="v4.1"),
        pytest.param("glm-5", 78, 64, (1,), 78 * 788, id="glm-5"),
        pytest.param("glm-5.2", 78, 64, (1,), 78 * 656 + 21 * 132, id="glm-5.2"),
        pytest.param("glm-5.3", 78, 64, (1,), 78 * 656 + 21 * 132, id="glm-5.3"),
        pytest.param("glm-5.3-flash", 45, 64, (16,), 11 * (656 + 132 / 16), id="glm-5.3-flash"),
    ],
)
def test_shipped_models(name, layers, heads, ratios, kv_bytes):
    model = load_model(name)
    assert (model.name, model.num_layers, model.num_heads, model.ratios) == (name, layers, heads, ratios)
    assert math.isclose(model.kv_bytes(), kv_bytes)


def test_every_shipped_name_is_tested():
    assert sorted(MODELS) == sorted(path.stem for path in FACTS.glob("*.json"))


def test_pools_are_chunked_apart_from_their_tokens():
    model = load_model("glm-5.3-flash")
    assert (model.ratios, model.slot_ratios) == ((16,), (1, 16))
    assert model.layers[0].index.topk == 128  # of 2048 tokens, pools of 16


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["file", "folder"])
def test_published_configs_read_the_same(tmp_path, name, place):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(name)))
    read = load_model(path if place == "file" else tmp_path)
    assert (read.name, read.layers) == (tmp_path.name, load_model(name).layers)


def test_indexer_types_as_a_list_or_as_runs():
    runs = config_of("glm-5.2") | {"indexer_types": None, "indexer_types_rle": [["full", 21], ["shared", 57]]}
    names = config_of("glm-5.2") | {"indexer_types": ["full"] * 21 + ["shared"] * 57}
    assert model_from_config(runs, "m").layers == model_from_config(names, "m").layers == load_model("glm-5.2").layers


ODD_VALUES = [True, -1, 0, 1.5, float("nan"), "x", [], {}, [None], [[1]], [1, 2], {"a": 1}, 1 << 70, [["full", -1]]]


@pytest.mark.parametrize("name", MODELS)
def test_odd_fields_give_a_model_or_a_config_error(name):
    config = config_of(name)
    refused = 0
    for field in [*config, "config", "text_config", "indexer_types", "indexer_types_rle"]:
        for value in ODD_VALUES:
            message = ""
            try:
                model_from_config(config | {field: value}, "odd")
            except ConfigError as error:
                message = str(error)
            assert message.startswith("odd: " if message else "")
            refused += message != ""
    assert refused > 50


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"hidden_size": 0}, "hidden_size=0 in the config: it is a whole number of at least 1", id="zero"),
        pytest.param({"num_attention_heads": True}, "num_attention_heads=True", id="bool"),
        pytest.param({"hidden_size": None}, "hidden_size=None", id="missing"),
        pytest.param(
            {"model_type": "llama"},
            "model_type='llama' is none of the families known here: .*deepseek_v32",
            id="family",
        ),
        pytest.param({"text_config": 5}, "text_config=5 in the config: it is an object", id="section"),
        pytest.param({"kv_lora_rank": 500}, "a latent row of 564 values; the known cache rows have", id="latent"),
        pytest.param(
            {"indexer_types": ["full"]}, r"indexer_types names \{'full': 1\}; it must name 61 layers", id="few"
        ),
        pytest.param({"indexer_types_rle": [["full", 1 << 60]]}, "it must name 61 layers", id="many"),
        pytest.param({"indexer_types_rle": "full"}, "lists layer types, or .type, count. runs", id="text"),
        pytest.param({"index_kpool": 3}, "index_kpool=3 must be a divisor of index_topk=2048", id="pool"),
    ],
)
def test_configs_that_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        model_from_config(config_of("deepseek-v3.2") | change, "m")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        pytest.param(
            "glm-5.2",
            {"indexer_types": None, "indexer_types_rle": None},
            "index_topk_freq=4 .* say which in indexer_types",
            id="shared-selections-unnamed",
        ),
        pytest.param("glm-5.3-flash", {"index_topk_freq": 2}, "index_topk_freq=2 .*not known", id="pools-shared"),
        pytest.param(
            "glm-5.3-flash",
            {"layer_types": ["linear_attention"] * 30 + ["indexed_attention"] * 15},
            "names 45 layers, 30 of them linear_attention; .* every fourth of its 45",
            id="another-pattern",
        ),
    ],
)
def test_layer_patterns_that_are_not_known_are_refused(name, change, words):
    with pytest.raises(ConfigError, match=words):
        model_from_config(config_of(name) | change, "m")


def test_layer_types_that_say_what_is_known():
    kinds = ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(45)]
    model = model_from_config(config_of("glm-5.3-flash") | {"layer_types": kinds, "index_topk_freq": 1}, "m")
    assert model.layers == load_model("glm-5.3-flash").layers


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b"\xff\xfe", b"", b"[" * 100_000], ids=["cut", "list", "utf-16", "empty", "deep"]
)
def test_files_that_are_no_config(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json: "):
        load_model(path)


def test_unknown_model_names_the_choices():
    with pytest.raises(ConfigError, match=r"unknown model 'gpt': use one of deepseek-v3\.2, .*path of a config\.json"):
        load_model("gpt")


@pytest.mark.parametrize(
    ("name", "world", "words"),
    [
        pytest.param("deepseek-v3.2", {"tp": 3}, "has 128 heads: tp=3 must divide them", id="heads"),
        pytest.param(
            "deepseek-v4-flash", {}, "block_size=64 is not a multiple of 128, .*use block_size 128 or 256", id="block"
        ),
        pytest.param(
            "deepseek-v4-flash",
            {"tp": 2, "dcp": 2, "block_size": 256, "interleave": 64},
            "interleave=64 is not a multiple of 128, .*use interleave 128 or 256",
            id="interleave",
        ),
        pytest.param(
            "glm-5.3-flash",
            {"tp": 2, "dcp": 2},
            "interleave=1 is not a multiple of 16, .*use interleave 16 or 32",
            id="pool-spans-two-ranks",
        ),
        pytest.param("deepseek-v4.1-flash", {"tp": 2, "dcp": 2}, "interleave=1 is not a multiple of 2", id="ratio-2"),
    ],
)
def test_worlds_that_are_refused(name, world, words):
    with pytest.raises(ConfigError, match=words):
        load_model(name).check(Topology(**world))


def test_interleave_is_free_without_dcp():
    load_model("deepseek-v4-flash").check(Topology(pcp=4, tp=2, block_size=128))


def test_lengths_of_several_ratios_meet_in_one_block():
    layers = tuple(
        Layer("dsa", 1, compress_ratio=ratio, key_dim=4, value_dim=4, key_bytes=4, index=Index(2, 1, 4, ratio, 4))
        for ratio in (4, 6)
    )
    model = Model("odd", "odd", 8, 4, 1024, layers)
    with pytest.raises(ConfigError, match="not a multiple of 12"):
        model.check(Topology(block_size=16))
    model.check(Topology(block_size=24))
