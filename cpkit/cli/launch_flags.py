"""Flags of vLLM 0.33.0 and SGLang 0.5.23 that context parallelism or memory depend on, and what they set."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """What a flag sets.

    sets: field of a Deployment, or a limit. parse: size, share, text, json, or verified: drafts and a decode's own
    token. switch: it takes no value and sets `value`. inside: fields by key of a JSON object.
    """

    sets: str
    parse: str = "text"
    switch: bool = False
    value: Any = None
    inside: dict[str, str] = field(default_factory=dict)


def _speculation(text: str) -> str:
    plain = text.lower().replace("_", "-")
    words = {"mtp": ("mtp", "nextn"), "dspark": ("dspark",), "eagle": ("eagle",), "draft-model": ("standalone",)}
    return next((known for known, parts in words.items() if any(part in plain for part in parts)), plain)


MEANINGS: dict[str, Callable[[str], str]] = {
    "speculation": _speculation,
    "kv_transfer": lambda text: re.sub("connector$", "", text.lower()),
    "kv_role": lambda text: text.lower().removeprefix("kv_"),
    "graphs": lambda text: text.lower(),
    "attention_backend": lambda text: text.lower().replace("_", "-"),
    "kv_cache_dtype": lambda text: text.lower().replace("bfloat16", "bf16"),
}
"""How engines' words become those of the rules."""


def in_our_words(name: str, value: Any) -> Any:
    """A setting's value as the rules call it.  kv_role, kv_producer -> producer"""
    return MEANINGS[name](str(value)) if name in MEANINGS else value


SIZE, SHARE = "size", "share"
SPECULATION = {"method": "speculation", "num_speculative_tokens": "num_speculative_tokens"}

VLLM_FLAGS: dict[str, Flag] = {
    **dict.fromkeys(("-tp", "--tensor-parallel-size"), Flag("tp", SIZE)),
    **dict.fromkeys(("-pcp", "--prefill-context-parallel-size"), Flag("pcp", SIZE)),
    **dict.fromkeys(("-dcp", "--decode-context-parallel-size"), Flag("dcp", SIZE)),
    **dict.fromkeys(("-pp", "--pipeline-parallel-size"), Flag("pp", SIZE)),
    **dict.fromkeys(("-dp", "--data-parallel-size"), Flag("dp", SIZE)),
    **dict.fromkeys(("-sc", "--speculative-config"), Flag("", "json", inside=SPECULATION)),
    **dict.fromkeys(("-cc", "--compilation-config"), Flag("", "json", inside={"cudagraph_mode": "graphs"})),
    **dict.fromkeys(("-ac", "--attention-config"), Flag("", "json", inside={"backend": "attention_backend"})),
    "--model": Flag("model"),
    "--cp-kv-cache-interleave-size": Flag("interleave", SIZE),
    "--dcp-kv-cache-interleave-size": Flag("old_interleave", SIZE),
    "--block-size": Flag("block_size", SIZE),
    "--attention-backend": Flag("attention_backend"),
    "--kv-cache-dtype": Flag("kv_cache_dtype"),
    "--dcp-comm-backend": Flag("merge"),
    "--kv-transfer-config": Flag("", "json", inside={"kv_connector": "kv_transfer", "kv_role": "kv_role"}),
    "--max-model-len": Flag("max_model_len", SIZE),
    "--max-num-batched-tokens": Flag("max_num_batched_tokens", SIZE),
    "--max-num-seqs": Flag("max_num_seqs", SIZE),
    "--gpu-memory-utilization": Flag("utilization", SHARE),
    "--enforce-eager": Flag("graphs", switch=True, value="none"),
    "--dcp-q-replicate": Flag("features", switch=True, value="replicated-queries"),
    "--enable-lora": Flag("features", switch=True, value="lora"),
    "--enable-dbo": Flag("features", switch=True, value="dual-batch-overlap"),
    "--enable-return-routed-experts": Flag("features", switch=True, value="return-routed-experts"),
    "--enable-prefix-caching": Flag("prefix_caching", switch=True, value=True),
    "--no-enable-prefix-caching": Flag("prefix_caching", switch=True, value=False),
}

SGLANG_FLAGS: dict[str, Flag] = {
    **dict.fromkeys(("--model-path", "--model"), Flag("model")),
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), Flag("tp", SIZE)),
    **dict.fromkeys(("--pp-size", "--pipeline-parallel-size"), Flag("pp", SIZE)),
    **dict.fromkeys(("--dp", "--dp-size", "--data-parallel-size"), Flag("dp", SIZE)),
    **dict.fromkeys(("--attn-cp-size", "--attention-context-parallel-size"), Flag("pcp", SIZE)),
    **dict.fromkeys(("--dcp-size", "--decode-context-parallel-size"), Flag("dcp", SIZE)),
    **dict.fromkeys(("--attention-backend", "--dsa-decode-backend"), Flag("attention_backend")),
    "--enable-dp-attention": Flag("dp_attention", switch=True, value=True),
    "--enable-prefill-cp": Flag("prefill_cp", switch=True, value=True),
    "--cp-strategy": Flag("cp_strategy"),
    "--dcp-comm-backend": Flag("merge"),
    "--moe-dp-size": Flag("moe_dp", SIZE),
    "--moe-a2a-backend": Flag("moe_a2a"),
    "--kv-cache-dtype": Flag("kv_cache_dtype"),
    "--page-size": Flag("block_size", SIZE),
    "--enable-dsa-cache-layer-split": Flag("kv_saving", switch=True, value="layer-split"),
    "--enable-kv-cache-sharding": Flag("kv_saving", switch=True, value="kv-sharding"),
    "--disaggregation-mode": Flag("disaggregation"),
    "--disaggregation-transfer-backend": Flag("kv_transfer"),
    "--speculative-algorithm": Flag("speculation"),
    "--speculative-eagle-topk": Flag("eagle_topk", SIZE),
    "--speculative-num-draft-tokens": Flag("num_speculative_tokens", "verified"),
    "--dcp-replicate-q-proj": Flag("features", switch=True, value="replicated-queries"),
    "--enable-hisparse": Flag("features", switch=True, value="hisparse"),
    "--enable-hierarchical-cache": Flag("features", switch=True, value="hicache"),
    "--context-length": Flag("max_model_len", SIZE),
    "--chunked-prefill-size": Flag("max_num_batched_tokens", SIZE),
    "--max-running-requests": Flag("max_num_seqs", SIZE),
    "--mem-fraction-static": Flag("utilization", SHARE),
    "--disable-radix-cache": Flag("prefix_caching", switch=True, value=False),
    "--disable-cuda-graph": Flag("graphs", switch=True, value="none"),
}

ENVIRONMENT: dict[str, Flag] = {
    "VLLM_ATTENTION_BACKEND": Flag("attention_backend"),
    "VLLM_USE_V2_MODEL_RUNNER=0": Flag("features", switch=True, value="model-runner-v1"),
    **dict.fromkeys(
        (f"VLLM_USE_DIRECT_DCP_{what}=1" for what in ("A2A", "Q_GATHER", "KV_GATHER")),
        Flag("features", switch=True, value="direct-dcp"),
    ),
}
"""Variables in front of a line, some of them only with one value."""

SWITCHES = frozenset(
    (
        "--async-scheduling",
        "--disable-log-requests",
        "--disable-log-stats",
        "--disable-overlap-schedule",
        "--disable-shared-experts-fusion",
        "--enable-auto-tool-choice",
        "--enable-chunked-prefill",
        "--enable-eplb",
        "--enable-expert-parallel",
        "--enable-metrics",
        "--enable-mixed-chunk",
        "--enable-multimodal",
        "--enable-torch-compile",
        "--enable-two-batch-overlap",
        "--headless",
        "--trust-remote-code",
    )
)
"""Flags that take no value and that nothing here depends on: they are listed as ignored."""
