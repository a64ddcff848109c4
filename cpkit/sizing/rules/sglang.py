"""What SGLang 0.5.23 refuses under context parallelism."""

from cpkit.sizing.deployment import Deployment
from cpkit.sizing.rules.backends import backend, runs_on_chip
from cpkit.sizing.rules.rule import Note, Rule

DSA = ("deepseek_v32", "glm_moe_dsa")
A2A_OF_V4 = ("none", "deepep", "megamoe", "mori")
WORLD = ("tp", "pcp", "attn_dp")


def _is_v4(d: Deployment) -> bool:
    return d.model.model_type == "deepseek_v4"


def _cp(d: Deployment) -> bool:
    """Prefill CP splits something."""
    return d.pcp > 1


def _no_dcp(d: Deployment) -> bool:
    """Its backend is known to have no DCP for selected keys."""
    known = backend("sglang", d.attention_backend)
    return known is not None and known.dcp is False


def _sharding_fits(d: Deployment) -> bool:
    """Everything that KV sharding of DSA models asks for, dcp aside."""
    known = backend("sglang", d.attention_backend)
    runs = known is not None and known.name == "trtllm" and d.kv_cache_dtype == "fp8_e4m3" and d.block_size == 64
    splits = d.cp_strategy == "interleave" and d.pcp > 1 and d.pp == 1
    return runs and splits and d.kv_transfer == "mooncake" and not d.pools


RULES = (
    Rule(
        "sglang-dcp-tp",
        "dcp={d.dcp} does not divide tp={d.tp}",
        "server arguments",
        lambda d: d.tp % d.dcp > 0,
        "a dcp that divides tp",
        ("dcp", "tp"),
    ),
    Rule(
        "sglang-cp-tp",
        "attn-cp-size={d.pcp} does not divide tp={d.tp}, out of which it is cut",
        "server arguments",
        lambda d: d.tp % d.pcp > 0,
        "an attn-cp-size that divides tp",
        ("pcp", "tp"),
    ),
    Rule(
        "sglang-dp-cp-tp",
        "attention-DP {d.attn_dp} x attn-cp-size {d.pcp} does not divide tp={d.tp}",
        "server arguments",
        lambda d: d.tp % (d.attn_dp * d.pcp) > 0,
        "sizes whose product divides tp",
        WORLD,
    ),
    Rule(
        "sglang-heads-tp",
        "{d.model.num_heads} heads do not divide over {d.head_ranks} ranks of attention TP "
        "(tp={d.tp} / attn-cp-size {d.pcp} / attention-DP {d.attn_dp})",
        "server arguments",
        lambda d: d.model.num_heads % d.head_ranks > 0,
        "an attention TP that divides the heads",
        WORLD,
        derived=True,
    ),
    Rule(
        "sglang-dcp-attention-tp",
        "dcp={d.dcp} does not divide the {d.head_ranks} ranks of attention TP",
        "sgl-project/sglang pull 31821",
        lambda d: d.attn_dp > 1 and d.head_ranks % d.dcp > 0,
        "a dcp that divides tp / attention-DP",
        ("dcp", "attn_dp", "tp"),
    ),
    Rule(
        "sglang-moe-dp-tp",
        "moe-dp-size={d.moe_dp} does not divide tp={d.tp}",
        "server arguments",
        lambda d: d.tp % d.moe_dp > 0,
        "a moe-dp-size that divides tp",
        ("moe_dp", "tp"),
    ),
    Rule(
        "sglang-moe-dp-cp",
        "attn-cp-size={d.pcp} differs from moe-dp-size={d.moe_dp}: they may differ only where moe-dp-size is 1",
        "server arguments",
        lambda d: d.moe_dp not in (1, d.pcp),
        "moe-dp-size 1, or equal to attn-cp-size",
        ("moe_dp", "pcp"),
    ),
    Rule(
        "sglang-moe-dp-pp",
        "pp={d.pp} with moe-dp-size={d.moe_dp}: pipeline stages go with moe-dp-size 1 alone",
        "server arguments",
        lambda d: d.pp > 1 and d.moe_dp > 1,
        "pp 1 or moe-dp-size 1",
        ("pp", "moe_dp"),
    ),
    Rule(
        "sglang-dcp-with-cp",
        "dcp={d.dcp} together with prefill CP (attn-cp-size {d.pcp}): one or the other",
        "server arguments",
        lambda d: d.dcp > 1 and _cp(d),
        "dcp 1, or prefill CP off",
        ("dcp", "pcp"),
    ),
    Rule(
        "sglang-merge-dcp",
        "dcp-comm-backend {d.merge} with dcp=1: a2a and fi_a2a need dcp > 1",
        "server arguments",
        lambda d: d.merge in ("a2a", "fi_a2a") and d.dcp == 1,
        "no --dcp-comm-backend, or dcp > 1",
        ("merge", "dcp"),
    ),
    Rule(
        "sglang-fi-a2a-chip",
        "dcp-comm-backend fi_a2a on {d.chip.name}: it is CUDA only, for Blackwell inside one NVLink domain",
        "server arguments",
        lambda d: d.merge == "fi_a2a" and d.chip is not None and not d.chip.is_blackwell,
        "--dcp-comm-backend a2a or ag_rs",
        ("merge",),
    ),
    Rule(
        "sglang-fi-a2a-domain",
        "dcp-comm-backend fi_a2a over dcp={d.dcp} ranks: an NVLink domain of {d.chip.name} has "
        "{d.chip.gpus_per_domain.value:.0f}",
        "server arguments",
        lambda d: d.merge == "fi_a2a" and d.chip is not None and d.dcp > d.chip.gpus_per_domain.value,
        "a dcp inside one NVLink domain, or another --dcp-comm-backend",
        ("merge", "dcp"),
    ),
    Rule(
        "sglang-replicated-queries",
        "a replicated query projection with reduction {d.reduction}: it goes with a2a alone",
        "server arguments",
        lambda d: "replicated-queries" in d.features and d.reduction != "a2a",
        "--dcp-comm-backend a2a, or no --dcp-replicate-q-proj",
        ("merge", "features"),
    ),
    Rule(
        "sglang-cp-strategy",
        "prefill CP without --cp-strategy: it must be given, zigzag or interleave",
        "server arguments",
        lambda d: (_cp(d) or d.prefill_cp) and d.cp_strategy is None,
        "--cp-strategy interleave (or zigzag, where the model allows it)",
        ("cp_strategy", "pcp", "prefill_cp"),
    ),
    Rule(
        "sglang-cp-dsa-tp",
        "prefill CP of {d.model.name} with tp={d.tp}: DSA models have at most 8",
        "model configuration of DSA",
        lambda d: _cp(d) and d.model.model_type in DSA and d.tp > 8,
        "tp at most 8, one machine",
        ("tp", "pcp"),
    ),
    Rule(
        "sglang-cp-v32-strategy",
        "--cp-strategy {d.cp_strategy} with {d.model.name}: DeepSeek-V3.2 takes interleave alone",
        "model configuration of DSA",
        lambda d: _cp(d) and d.model.model_type == "deepseek_v32" and d.cp_strategy not in (None, "interleave"),
        "--cp-strategy interleave",
        ("cp_strategy", "pcp"),
    ),
    Rule(
        "sglang-cp-v4-strategy",
        "--cp-strategy {d.cp_strategy} with {d.model.name}: on CUDA and HIP DeepSeek-V4 takes interleave alone",
        "model configuration of DeepSeek-V4",
        lambda d: _cp(d) and _is_v4(d) and d.cp_strategy not in (None, "interleave"),
        "--cp-strategy interleave",
        ("cp_strategy", "pcp"),
    ),
    Rule(
        "sglang-cp-v4-attention-dp",
        "prefill CP of {d.model.name} with attention-DP {d.attn_dp}: it takes 1",
        "model configuration of DeepSeek-V4",
        lambda d: _cp(d) and _is_v4(d) and d.attn_dp > 1,
        "attention-DP 1",
        ("attn_dp", "pcp"),
    ),
    Rule(
        "sglang-cp-v4-tp",
        "prefill CP of {d.model.name} with tp={d.tp}: at most 8, one machine (results lose precision across machines)",
        "model configuration of DeepSeek-V4",
        lambda d: _cp(d) and _is_v4(d) and d.tp > 8,
        "tp at most 8",
        ("tp", "pcp"),
    ),
    Rule(
        "sglang-cp-v4-moe",
        f"prefill CP of {{d.model.name}} with MoE exchange {{d.moe_a2a}}: it takes one of {', '.join(A2A_OF_V4)}",
        "model configuration of DeepSeek-V4",
        lambda d: _cp(d) and _is_v4(d) and d.moe_a2a not in A2A_OF_V4,
        "another --moe-a2a-backend",
        ("moe_a2a", "pcp"),
    ),
    Rule(
        "sglang-cp-kpool-group",
        "prefill CP of {d.model.name} with attn-cp-size {d.pcp} of tp={d.tp}: its CP group is the whole TP group",
        "model configuration of GLM-5.3-Flash",
        lambda d: _cp(d) and d.pools and d.pcp != d.tp,
        "attn-cp-size = tp",
        ("pcp", "tp"),
    ),
    Rule(
        "sglang-cp-kpool-strategy",
        "--cp-strategy {d.cp_strategy} with {d.model.name}: it takes interleave alone",
        "model configuration of GLM-5.3-Flash",
        lambda d: _cp(d) and d.pools and d.cp_strategy not in (None, "interleave"),
        "--cp-strategy interleave",
        ("cp_strategy", "pcp"),
    ),
    Rule(
        "sglang-dcp-kpool",
        "dcp={d.dcp} with {d.model.name}: an indexer that scores pools of keys takes no dcp",
        "DSA attention backend",
        lambda d: d.dcp > 1 and d.pools,
        "dcp 1",
        ("dcp",),
    ),
    Rule(
        "sglang-page-kpool",
        "page size {d.block_size} with {d.model.name}: it is 64 x index_kpool = 1024",
        "DSA attention backend",
        lambda d: d.pools and d.block_size != 64 * d.key_ratio,
        "--page-size 1024",
        ("block_size",),
    ),
    Rule(
        "sglang-cp-decode",
        "prefill CP on a decode worker: workers that only decode take none",
        "server arguments",
        lambda d: _cp(d) and d.disaggregation == "decode",
        "attn-cp-size 1 on the decode side (dcp there is refused for DSA too)",
        ("pcp", "disaggregation"),
    ),
    Rule(
        "sglang-layer-split",
        "cache layer split needs a prefill worker of a disaggregated pair, --cp-strategy interleave and mooncake; "
        "here: disaggregation {d.disaggregation}, strategy {d.cp_strategy}, transfer {d.kv_transfer}",
        "server arguments",
        lambda d: (
            d.kv_saving == "layer-split"
            and (d.disaggregation, d.cp_strategy, d.kv_transfer) != ("prefill", "interleave", "mooncake")
        ),
        "no --enable-dsa-cache-layer-split, or all three",
        ("kv_saving", "disaggregation", "cp_strategy", "kv_transfer"),
    ),
    Rule(
        "sglang-kv-sharding",
        "KV sharding needs interleave CP > 1, pp 1, trtllm, fp8_e4m3, page 64, mooncake, and an indexer without pools; "
        "here: {d.cp_strategy} CP {d.pcp}, pp {d.pp}, {d.attention_backend}, {d.kv_cache_dtype}, page {d.block_size}, "
        "{d.kv_transfer}",
        "server arguments",
        lambda d: d.kv_saving == "kv-sharding" and not _sharding_fits(d),
        "no --enable-kv-cache-sharding, or everything that it needs",
        ("kv_saving", "cp_strategy", "pcp", "pp", "attention_backend", "kv_cache_dtype", "block_size", "kv_transfer"),
    ),
    Rule(
        "sglang-kv-sharding-dcp",
        "KV sharding together with dcp={d.dcp}: one or the other",
        "server arguments",
        lambda d: d.kv_saving == "kv-sharding" and d.dcp > 1,
        "dcp 1, or no --enable-kv-cache-sharding",
        ("kv_saving", "dcp"),
    ),
    Rule(
        "sglang-dcp-hisparse",
        "dcp={d.dcp} with HiSparse",
        "DSA attention backend",
        lambda d: d.dcp > 1 and "hisparse" in d.features,
        "dcp 1, or HiSparse off",
        ("dcp", "features"),
    ),
    Rule(
        "sglang-dcp-hicache",
        "dcp={d.dcp} with HiCache",
        "DSA attention backend",
        lambda d: d.dcp > 1 and "hicache" in d.features,
        "dcp 1, or HiCache off",
        ("dcp", "features"),
    ),
    Rule(
        "sglang-dcp-disaggregation",
        "dcp={d.dcp} on a {d.disaggregation} worker: DCP of DSA models does not go with disaggregation",
        "DSA attention backend",
        lambda d: d.dcp > 1 and d.disaggregation is not None,
        "dcp 1, or one worker for prefill and decode",
        ("dcp", "disaggregation"),
    ),
    Rule(
        "sglang-dcp-eagle",
        "dcp={d.dcp} with EAGLE of {d.eagle_topk} branches: it takes 1",
        "DSA attention backend",
        lambda d: d.dcp > 1 and d.eagle_topk > 1,
        "--speculative-eagle-topk 1",
        ("eagle_topk", "dcp"),
    ),
    Rule(
        "sglang-dcp-backend",
        "dcp={d.dcp} with attention backend {d.attention_backend}: DCP of DSA models is on the trtllm backends alone",
        "DSA attention backend",
        lambda d: d.dcp > 1 and _no_dcp(d),
        "--attention-backend trtllm, on Blackwell, or dcp 1",
        ("attention_backend", "dcp"),
    ),
    Rule(
        "sglang-backend-chip",
        "attention backend {d.attention_backend} on {d.chip.name} ({d.chip.arch}): it has no kernels for this chip",
        "DSA attention backend",
        lambda d: not runs_on_chip(d),
        "another --attention-backend",
        ("attention_backend",),
    ),
)

NOTES = (
    Note(
        "sglang-dcp-replicates-index",
        "indexer keys are kept by every rank of a DCP group: capacity grows less than dcp={d.dcp}",
        "DSA attention backend",
        lambda d: d.dcp > 1,
    ),
    Note(
        "sglang-zigzag-short",
        "zigzag applies only to steps in which every request adds at least 2 x attn-cp-size tokens",
        "context parallel utilities",
        lambda d: _cp(d) and d.cp_strategy == "zigzag",
    ),
    Note(
        "sglang-cp-full-kv",
        "prefill CP saves no memory: every rank keeps all keys",
        "context parallel utilities",
        lambda d: _cp(d) and d.kv_saving is None,
    ),
    Note(
        "sglang-dcp-unread",
        "what was read of DCP is about DSA models; whether {d.model.name} takes dcp={d.dcp} was not",
        "DSA attention backend",
        lambda d: d.dcp > 1 and d.compresses,
    ),
)
