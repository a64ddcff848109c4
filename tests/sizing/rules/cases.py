"""For every rule a deployment that breaks it, and changes that satisfy it, written from what the engines say."""

V32, V4, V41, GLM, POOL = "deepseek-v3.2", "deepseek-v4-pro", "deepseek-v4.1-flash", "glm-5.2", "glm-5.3-flash"


def case(rule, model, broken, mended):
    return rule, {"model": model, **broken}, mended


def having(*features):
    return {"features": frozenset(features)}


NONE = {"features": frozenset()}

VLLM = (
    case("vllm-dcp-tp", V32, {"tp": 8, "dcp": 3}, {"dcp": 4}),
    case("vllm-dcp-pcp", V32, {"tp": 8, "pcp": 2, "dcp": 4}, {"dcp": 2}),
    case("vllm-heads-tp", V32, {"tp": 3}, {"tp": 4}),
    case("vllm-gqa-tp", V32, {"tp": 8, "dcp": 4, "kv_heads": 4}, {"dcp": 2}),
    case("vllm-gqa-heads", GLM, {"tp": 12, "dcp": 3, "kv_heads": 4}, {"dcp": 2}),
    case("vllm-interleave-block", V32, {"tp": 8, "dcp": 2, "interleave": 48}, {"interleave": 32}),
    case("vllm-interleave-keys", POOL, {"tp": 8, "dcp": 2, "interleave": 8}, {"interleave": 16}),
    case("vllm-dcp-v4", V4, {"tp": 8, "dcp": 2}, {"dcp": 1}),
    case("vllm-a2a-heads", GLM, {"tp": 96, "dcp": 3}, {"merge": "ag_rs"}),
    case("vllm-merge-name", V32, {"merge": "fi_a2a"}, {"merge": "a2a"}),
    case("vllm-direct-ranks", V32, {"tp": 2, **having("direct-dcp")}, {"dcp": 2}),
    case("vllm-pcp-runner", V32, {"pcp": 2, **having("model-runner-v1")}, NONE),
    case("vllm-pcp-mla", V32, {"pcp": 2, "kv_heads": 8}, {"pcp": 1}),
    case("vllm-pcp-encoder-decoder", V32, {"pcp": 2, **having("encoder-decoder")}, NONE),
    case("vllm-pcp-multimodal", V32, {"pcp": 2, **having("multimodal")}, NONE),
    case("vllm-pcp-lora", V32, {"pcp": 2, **having("lora")}, {"pcp": 1}),
    case("vllm-pcp-speculation", V32, {"pcp": 2, "speculation": "eagle"}, {"speculation": "mtp"}),
    case("vllm-pcp-speculation", V32, {"pcp": 2, "speculation": "mtp", "draft_modules": 2}, {"draft_modules": 1}),
    case("vllm-pcp-speculation", V32, {"tp": 2, "pcp": 2, "dcp": 4, "speculation": "dspark"}, {"dcp": 2}),
    case("vllm-pcp-dcp-sparse", "no-index", {"pcp": 2, "dcp": 2}, {"dcp": 1}),
    case("vllm-pcp-dcp-merge", GLM, {"pcp": 2, "dcp": 2}, {"merge": "ag_rs"}),
    case("vllm-pcp-dcp-kpool", POOL, {"pcp": 2, "dcp": 2}, {"pcp": 1}),
    case("vllm-pcp-graphs", V4, {"pcp": 2, "graphs": "piecewise"}, {"graphs": "none"}),
    case("vllm-pcp-full-graphs", V32, {"pcp": 2, "graphs": "full"}, {"graphs": "full_decode_only"}),
    case("vllm-cp-dual-batch", V32, {"tp": 2, "dcp": 2, **having("dual-batch-overlap")}, {"dcp": 1}),
    case("vllm-cp-routed-experts", V32, {"pcp": 2, **having("return-routed-experts")}, {"pcp": 1}),
    case("vllm-dcp-hisparse", V32, {"tp": 2, "dcp": 2, **having("hisparse")}, NONE),
    case("vllm-backend-name", V32, {"attention_backend": "triton-mla"}, {"attention_backend": "flashmla-sparse"}),
    case("vllm-backend-sparse", V32, {"attention_backend": "flashinfer-mla"}, {"attention_backend": "b12x-mla-sparse"}),
    case(
        "vllm-backend-chip",
        V32,
        {"chip": "h200", "attention_backend": "flashinfer-mla-sparse"},
        {"attention_backend": "flashmla-sparse"},
    ),
    case("vllm-backend-chip", V32, {"chip": "mi300x"}, {"attention_backend": "rocm-aiter-mla-sparse"}),
    case("vllm-backend-dcp", V32, {"tp": 8, "dcp": 2, "attention_backend": "flash-attn-mla-sparse"}, {"dcp": 1}),
    case(
        "vllm-backend-both",
        V32,
        {"pcp": 2, "dcp": 2, "attention_backend": "flashinfer-mla-sparse"},
        {"attention_backend": "flashmla-sparse"},
    ),
    case(
        "vllm-backend-interleave",
        V32,
        {"tp": 2, "dcp": 2, "interleave": 64, "attention_backend": "flashinfer-mla"},
        {"interleave": 1},
    ),
    case("vllm-flashmla-dtype", V32, {"tp": 8, "dcp": 2, "kv_cache_dtype": "bf16"}, {"kv_cache_dtype": "fp8_ds_mla"}),
    case("vllm-flashmla-heads", V32, {"tp": 4, "dcp": 2}, {"tp": 8}),
    case("vllm-flashmla-padding", V32, {"tp": 8, "dcp": 8}, {"dcp": 4}),
    case("vllm-flashmla-padding", V32, {"tp": 2, "pcp": 4, "dcp": 8}, {"dcp": 4}),
    case("vllm-merge-cuda", V32, {"tp": 2, "dcp": 2, "chip": "mi300x"}, {"dcp": 1}),
    case("vllm-merge-cutedsl", V32, {"tp": 2, "dcp": 2, **having("no-cutedsl")}, NONE),
    case("vllm-merge-fp32", V32, {"tp": 2, "dcp": 2, **having("fp16-logits")}, NONE),
    case("vllm-merge-topk", POOL, {"tp": 2, "dcp": 2}, {"dcp": 1}),
    case("vllm-nixl-dcp", GLM, {"tp": 8, "dcp": 2, "kv_transfer": "nixl"}, {"dcp": 8}),
    case("vllm-nixl-mla", V32, {"tp": 8, "dcp": 8, "kv_heads": 1, "kv_transfer": "nixl"}, {"kv_heads": 0}),
    case("vllm-nixl-pcp", V32, {"pcp": 2, "kv_transfer": "nixl"}, {"kv_role": "producer"}),
    case("vllm-nixl-both", V32, {"tp": 2, "pcp": 2, "dcp": 2, "kv_transfer": "nixl"}, {"tp": 1}),
    case("vllm-nixl-sides", V32, {"tp": 4, "dcp": 4, "remote_dcp": 6, "kv_transfer": "nixl"}, {"remote_dcp": 8}),
    case("vllm-v41-dcp", V41, {"tp": 2, "dcp": 2}, {"dcp": 1}),
    case("vllm-v41-pcp-chip", V41, {"pcp": 2, "chip": "mi300x"}, {"pcp": 1}),
    case(
        "vllm-v41-pcp-backend",
        V41,
        {"pcp": 2, "attention_backend": "flashinfer-mla-sparse"},
        {"attention_backend": "flashmla-sparse"},
    ),
    case("vllm-v41-pcp-sizes", V41, {"pcp": 2, "pp": 2}, {"pp": 1}),
    case("vllm-v41-pcp-extras", V41, {"pcp": 2, "speculation": "mtp"}, {"speculation": None}),
    case("vllm-v41-pcp-extras", V41, {"pcp": 2, **having("mega-moe")}, NONE),
    case("vllm-v41-pcp-prefix", V41, {"pcp": 4, "replay_window": 7}, {"replay_window": 8}),
    case("vllm-v41-pcp-prefix", V41, {"pcp": 2}, {"prefix_caching": False}),
)

CP = {"tp": 8, "pcp": 2, "cp_strategy": "interleave"}
SHARDING = {
    **CP,
    "kv_saving": "kv-sharding",
    "attention_backend": "trtllm",
    "kv_cache_dtype": "fp8_e4m3",
    "kv_transfer": "mooncake",
}

SGLANG = (
    case("sglang-dcp-tp", V32, {"tp": 8, "dcp": 3}, {"dcp": 4}),
    case("sglang-cp-tp", V32, {**CP, "pcp": 3}, {"pcp": 4}),
    case("sglang-dp-cp-tp", V32, {**CP, "pcp": 4, "attn_dp": 4}, {"attn_dp": 2}),
    case("sglang-heads-tp", V32, {"tp": 3}, {"tp": 4}),
    case("sglang-dcp-attention-tp", V32, {"tp": 8, "dcp": 8, "attn_dp": 2}, {"dcp": 4}),
    case("sglang-moe-dp-tp", V32, {"tp": 8, "moe_dp": 3}, {"moe_dp": 2}),
    case("sglang-moe-dp-cp", V32, {**CP, "moe_dp": 4}, {"moe_dp": 2}),
    case("sglang-moe-dp-pp", V32, {**CP, "moe_dp": 2, "pp": 2}, {"pp": 1}),
    case("sglang-dcp-with-cp", V32, {**CP, "dcp": 2}, {"dcp": 1}),
    case("sglang-merge-dcp", V32, {"tp": 8, "merge": "a2a"}, {"dcp": 2}),
    case("sglang-fi-a2a-chip", V32, {"tp": 8, "dcp": 2, "merge": "fi_a2a", "chip": "h200"}, {"merge": "a2a"}),
    case("sglang-fi-a2a-domain", V32, {"tp": 16, "dcp": 16, "merge": "fi_a2a", "chip": "b200"}, {"dcp": 8}),
    case(
        "sglang-replicated-queries",
        V32,
        {"tp": 8, "dcp": 2, "merge": "ag_rs", **having("replicated-queries")},
        {"merge": "a2a"},
    ),
    case("sglang-cp-strategy", V32, {"tp": 8, "pcp": 2}, {"cp_strategy": "interleave"}),
    case("sglang-cp-strategy", V32, {"tp": 8, "prefill_cp": True}, {"prefill_cp": False}),
    case("sglang-cp-dsa-tp", GLM, {**CP, "tp": 16}, {"tp": 8}),
    case("sglang-cp-v32-strategy", V32, {**CP, "cp_strategy": "zigzag"}, {"cp_strategy": "interleave"}),
    case("sglang-cp-v4-strategy", V4, {**CP, "cp_strategy": "zigzag"}, {"cp_strategy": "interleave"}),
    case("sglang-cp-v4-attention-dp", V4, {**CP, "attn_dp": 2}, {"attn_dp": 1}),
    case("sglang-cp-v4-tp", V4, {**CP, "tp": 16}, {"tp": 8}),
    case("sglang-cp-v4-moe", V4, {**CP, "moe_a2a": "flashinfer"}, {"moe_a2a": "deepep"}),
    case("sglang-cp-kpool-group", POOL, {**CP, "pcp": 4}, {"pcp": 8}),
    case("sglang-cp-kpool-strategy", POOL, {**CP, "pcp": 8, "cp_strategy": "zigzag"}, {"cp_strategy": "interleave"}),
    case("sglang-dcp-kpool", POOL, {"tp": 8, "dcp": 2, "block_size": 1024}, {"dcp": 1}),
    case("sglang-page-kpool", POOL, {"tp": 8}, {"block_size": 1024}),
    case("sglang-cp-decode", V32, {**CP, "disaggregation": "decode"}, {"disaggregation": "prefill"}),
    case(
        "sglang-layer-split",
        V32,
        {**CP, "kv_saving": "layer-split", "kv_transfer": "mooncake"},
        {"disaggregation": "prefill"},
    ),
    case("sglang-kv-sharding", V32, {**SHARDING, "pp": 2}, {"pp": 1}),
    case("sglang-kv-sharding", V32, {**SHARDING, "attention_backend": "fa3"}, {"attention_backend": "trtllm"}),
    case("sglang-kv-sharding-dcp", V32, {**SHARDING, "dcp": 2}, {"dcp": 1}),
    case("sglang-dcp-hisparse", V32, {"tp": 8, "dcp": 2, **having("hisparse")}, NONE),
    case("sglang-dcp-hicache", V32, {"tp": 8, "dcp": 2, **having("hicache")}, NONE),
    case("sglang-dcp-disaggregation", V32, {"tp": 8, "dcp": 2, "disaggregation": "decode"}, {"disaggregation": None}),
    case("sglang-dcp-eagle", V32, {"tp": 8, "dcp": 2, "eagle_topk": 4}, {"eagle_topk": 1}),
    case(
        "sglang-dcp-backend",
        V32,
        {"tp": 8, "dcp": 2, "attention_backend": "flashmla-sparse"},
        {"attention_backend": "trtllm"},
    ),
    case("sglang-backend-chip", V32, {"chip": "h200", "attention_backend": "trtllm"}, {"attention_backend": "fa3"}),
)

CPKIT = (
    case("cpkit-dcp-sizes", V32, {"tp": 8, "dcp": 3}, {"dcp": 4}),
    case("cpkit-world", V32, {"tp": 128, "pcp": 512, "dp": 2}, {"dp": 1}),
    case("cpkit-heads-tp", V32, {"tp": 3}, {"tp": 4}),
    case("cpkit-interleave-block", V32, {"interleave": 48}, {"interleave": 32}),
    case("cpkit-block-keys", V4, {"block_size": 64}, {"block_size": 128}),
    case(
        "cpkit-interleave-keys",
        V4,
        {"tp": 8, "dcp": 8, "block_size": 128, "interleave": 64},
        {"interleave": 128},
    ),
    case("cpkit-heads-merge", GLM, {"tp": 64, "pcp": 3, "dcp": 3}, {"dcp": 1}),
    case("cpkit-heads-merge", GLM, {"tp": 1, "pcp": 3, "dcp": 3}, {"pcp": 4, "dcp": 4}),
    case("cpkit-merge", V32, {"merge": "fi_a2a"}, {"merge": None}),
)

CASES = {"vllm": VLLM, "sglang": SGLANG, "cpkit": CPKIT}
