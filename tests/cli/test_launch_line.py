"""Launch lines: what they set, what is ignored, and what is no line."""

import shlex

import pytest

from cpkit.cli.launch_line import read_launch_line
from cpkit.errors import InputError


def read(text):
    return read_launch_line(shlex.split(text))


@pytest.mark.parametrize(
    ("text", "engine", "model", "settings"),
    [
        pytest.param(
            "vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 -pcp 2 -dcp 4",
            "vllm",
            "deepseek-ai/DeepSeek-V3.2",
            {"tp": 8, "pcp": 2, "dcp": 4},
            id="vllm",
        ),
        pytest.param(
            "/opt/python3.12 -m vllm.entrypoints.openai.api_server --model m --tensor_parallel_size=4",
            "vllm",
            "m",
            {"tp": 4},
            id="vllm-module-and-underscores",
        ),
        pytest.param(
            "vllm serve m --max-model-len 32k --gpu-memory-utilization=0.85 --block-size 1K",
            "vllm",
            "m",
            {"max_model_len": 32_000, "utilization": 0.85, "block_size": 1024},
            id="suffixes",
        ),
        pytest.param(
            """vllm serve m -sc '{"method": "deepseek_mtp", "num_speculative_tokens": 2}' -cc.cudagraph_mode FULL""",
            "vllm",
            "m",
            {"speculation": "mtp", "num_speculative_tokens": 2, "graphs": "full"},
            id="json-and-dotted",
        ),
        pytest.param(
            """vllm serve m --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'""",
            "vllm",
            "m",
            {"kv_transfer": "nixl", "kv_role": "producer"},
            id="transfer",
        ),
        pytest.param(
            "VLLM_ATTENTION_BACKEND=FLASHMLA_SPARSE VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m --enable-lora",
            "vllm",
            "m",
            {"attention_backend": "flashmla-sparse", "features": frozenset({"model-runner-v1", "lora"})},
            id="variables",
        ),
        pytest.param(
            "vllm serve m --cp-kv-cache-interleave-size 16 --dcp-kv-cache-interleave-size 64",
            "vllm",
            "m",
            {"interleave": 64},
            id="older-name-wins",
        ),
        pytest.param(
            "vllm serve m --cp-kv-cache-interleave-size 16 --dcp-kv-cache-interleave-size 1",
            "vllm",
            "m",
            {"interleave": 16},
            id="older-name-says-nothing",
        ),
        pytest.param(
            "python -m sglang.launch_server --model-path m --tp 8 --attn-cp-size 2 --enable-prefill-cp "
            "--cp-strategy interleave --page-size 64",
            "sglang",
            "m",
            {"tp": 8, "pcp": 2, "prefill_cp": True, "cp_strategy": "interleave", "block_size": 64},
            id="sglang",
        ),
        pytest.param(
            "sglang serve --model m --tp-size 8 --dp-size 4 --enable-dp-attention",
            "sglang",
            "m",
            {"tp": 8, "attn_dp": 4},
            id="attention-dp",
        ),
        pytest.param("sglang serve --model m --tp-size 8 --dp 4", "sglang", "m", {"tp": 8, "dp": 4}, id="replicas"),
        pytest.param(
            "sglang serve --model m --speculative-algorithm NEXTN --speculative-num-draft-tokens 4",
            "sglang",
            "m",
            {"speculation": "mtp", "num_speculative_tokens": 3},
            id="sglang-counts-the-token-itself",
        ),
    ],
)
def test_what_a_line_sets(text, engine, model, settings):
    line = read(text)
    assert (line.engine, line.model, line.settings) == (engine, model, settings)
    assert line.ignored == ()


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        pytest.param("vllm serve m --port 8000 -tp 2", ("--port 8000",), id="flag-with-value"),
        pytest.param("vllm serve m --port=8000", ("--port=8000",), id="equals"),
        pytest.param("vllm serve --trust-remote-code m", ("--trust-remote-code",), id="switch-before-the-model"),
        pytest.param("vllm serve m --no-such-thing -tp 2", ("--no-such-thing",), id="no-switch"),
        pytest.param("FOO=1 vllm serve m more", ("FOO=1", "more"), id="variable-and-word"),
        pytest.param("VLLM_USE_DIRECT_DCP_A2A=0 vllm serve m", ("VLLM_USE_DIRECT_DCP_A2A=0",), id="switched-off"),
        pytest.param(
            """vllm serve m --kv-transfer-config '{"kv_port": 1}'""",
            ("--kv-transfer-config kv_port=1",),
            id="inside-json",
        ),
        pytest.param("vllm serve m --seed -1", ("--seed -1",), id="negative-number"),
    ],
)
def test_what_nothing_depends_on_is_listed(text, ignored):
    assert read(text).ignored == ignored


def test_a_line_as_one_string():
    assert read_launch_line(["vllm serve m -tp 2"]).settings == {"tp": 2}


@pytest.mark.parametrize(
    ("word", "known"),
    [("deepseek_mtp", "mtp"), ("NEXTN", "mtp"), ("EAGLE3", "eagle"), ("draft_model", "draft-model"),
     ("STANDALONE", "draft-model"), ("ngram", "ngram"), ("suffix", "suffix")],
)  # fmt: skip
def test_engines_words_for_drafts_are_the_rules(word, known):
    assert read(f"sglang serve --model m --speculative-algorithm {word}").settings == {"speculation": known}


def test_other_words_are_told():
    (told,) = read("vllm serve m --speculative-config.method eagle3").read_as
    assert told == "--speculative-config.method eagle3 as speculation eagle"


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        pytest.param(
            "vllm serve m --tensor-parallel 8", {"tp": 8}, ("--tensor-parallel as --tensor-parallel-size",), id="size"
        ),
        pytest.param(
            "sglang serve --model m --speculative-algo=EAGLE",
            {"speculation": "eagle"},
            ("--speculative-algo as --speculative-algorithm", "--speculative-algorithm EAGLE as speculation eagle"),
            id="equals",
        ),
        pytest.param("vllm serve m --max-num 8", {}, (), id="of-several"),
    ],
)
def test_shortened_flags_are_read_in_full_where_one_alone_is_meant(text, settings, told):
    line = read(text)
    assert (line.settings, line.read_as) == (settings, told)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("vllm serve m -tp8", "-tp8 is no flag: write -tp 8", id="stuck-value"),
        pytest.param("trtllm-serve m", "trtllm-serve m starts no engine that is known here", id="engine"),
        pytest.param("A=1", "nothing starts no engine", id="variables-alone"),
        pytest.param("vllm serve -tp 2 --port 80", "no model in this line; ignored were --port 80", id="no-model"),
        pytest.param("vllm serve m -tp two", "-tp two: 'two' is not a whole number", id="no-number"),
        pytest.param("vllm serve m -tp", "-tp has no value", id="no-value"),
        pytest.param("vllm serve m -sc [1]", r"-sc \[1\]: not a JSON object", id="no-object"),
        pytest.param("vllm serve m -sc {", "-sc {: Expecting property name", id="no-json"),
        pytest.param("vllm serve m --gpu-memory-utilization 0", "0: '0' is not a number above 0", id="no-share"),
        pytest.param("sglang serve --model m --speculative-num-draft-tokens 0", "0: the token itself", id="no-token"),
    ],
)
def test_what_is_no_line_is_refused(text, reason):
    with pytest.raises(InputError, match=reason):
        read(text)
