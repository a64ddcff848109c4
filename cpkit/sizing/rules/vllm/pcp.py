"""What vLLM 0.33.0 refuses under prefill context parallelism, and under both kinds together."""

from cpkit.sizing.deployment import Deployment
from cpkit.sizing.rules.rule import Rule

MANAGER, VLLM = "pcp_manager.py", "config/vllm.py"
GRAPH_MODELS = ("deepseek_v32", "glm_moe_dsa")
WORLD = ("tp", "pcp", "dcp")


def _without(feature: str, what: str) -> Rule:
    """PCP does not go with a feature."""
    return Rule(
        f"vllm-pcp-{feature}",
        f"pcp={{d.pcp}} with {what}",
        MANAGER,
        lambda d: d.pcp > 1 and feature in d.features,
        f"pcp 1, or no {what.removeprefix('an ')}",
        ("features", "pcp"),
    )


def _drafts(d: Deployment) -> bool:
    """Its speculation is one that PCP takes."""
    dspark = d.speculation == "dspark" and d.dcp in (1, d.pcp)
    return d.speculation is None or dspark or (d.speculation == "mtp" and d.draft_modules == 1)


def _graphed(d: Deployment) -> bool:
    """PCP of sparse MLA without DCP."""
    return d.pcp > 1 and d.dcp == 1 and d.index_topk > 0


PCP_RULES = (
    Rule(
        "vllm-pcp-runner",
        "pcp={d.pcp} with the older model runner: PCP is in runner V2",
        MANAGER,
        lambda d: d.pcp > 1 and "model-runner-v1" in d.features,
        "model runner V2",
        ("features", "pcp"),
    ),
    Rule(
        "vllm-pcp-mla",
        "pcp={d.pcp} with {d.kv_heads} KV heads: PCP needs MLA, one latent head",
        MANAGER,
        lambda d: d.pcp > 1 and d.kv_heads > 0,
        "pcp 1",
        ("pcp",),
    ),
    _without("encoder-decoder", "an encoder-decoder model"),
    _without("multimodal", "multimodal input"),
    _without("lora", "LoRA"),
    Rule(
        "vllm-pcp-speculation",
        "pcp={d.pcp} dcp={d.dcp} with {d.speculation} speculation ({d.draft_modules} draft modules): PCP takes DSpark "
        "(dcp 1 or pcp) or MTP of a single module",
        MANAGER,
        lambda d: d.pcp > 1 and not _drafts(d),
        "single-module MTP, DSpark with dcp 1 or pcp, or no speculation",
        ("speculation", "draft_modules", "pcp", "dcp"),
    ),
    Rule(
        "vllm-pcp-dcp-sparse",
        "pcp={d.pcp} with dcp={d.dcp} for {d.model.name}: the two together need sparse MLA (a model with index_topk)",
        MANAGER,
        lambda d: d.pcp > 1 and d.dcp > 1 and not d.index_topk,
        "pcp 1 or dcp 1",
        ("pcp", "dcp"),
    ),
    Rule(
        "vllm-pcp-dcp-merge",
        "pcp={d.pcp} with dcp={d.dcp} and reduction {d.reduction}: the two together need ag_rs "
        "(unset, glm_moe_dsa models take a2a)",
        MANAGER,
        lambda d: d.pcp > 1 and d.dcp > 1 and d.reduction != "ag_rs",
        "--dcp-comm-backend ag_rs",
        ("merge", "pcp", "dcp"),
    ),
    Rule(
        "vllm-pcp-dcp-kpool",
        "pcp={d.pcp} with dcp={d.dcp} for {d.model.name}: layers whose indexer scores pools refuse the two together",
        "mla_attention.py, models/glm5next",
        lambda d: d.pcp > 1 and d.dcp > 1 and d.pools,
        "pcp 1 or dcp 1",
        ("pcp", "dcp"),
    ),
    Rule(
        "vllm-pcp-graphs",
        "pcp={d.pcp} with {d.graphs} graphs for {d.model.model_type}: PCP of sparse MLA without DCP captures graphs of "
        "deepseek_v32 and glm_moe_dsa alone",
        MANAGER,
        lambda d: _graphed(d) and d.model.model_type not in GRAPH_MODELS and d.graphs not in (None, "none"),
        "cudagraph_mode NONE",
        ("graphs", "pcp"),
    ),
    Rule(
        "vllm-pcp-full-graphs",
        "pcp={d.pcp} with {d.graphs} graphs: PCP of sparse MLA captures full graphs of decodes alone",
        MANAGER,
        lambda d: (
            d.pcp > 1 and d.dcp == 1 and d.index_topk > 0 and d.model.model_type in GRAPH_MODELS and d.graphs == "full"
        ),
        "cudagraph_mode FULL_AND_PIECEWISE, FULL_DECODE_ONLY or PIECEWISE",
        ("graphs", "pcp"),
    ),
    Rule(
        "vllm-cp-dual-batch",
        "context parallelism (pcp={d.pcp} dcp={d.dcp}) with dual batch overlap",
        VLLM,
        lambda d: d.pcp * d.dcp > 1 and "dual-batch-overlap" in d.features,
        "no --enable-dbo",
        ("features", *WORLD),
    ),
    Rule(
        "vllm-cp-routed-experts",
        "context parallelism (pcp={d.pcp} dcp={d.dcp}) with returning routed experts",
        VLLM,
        lambda d: d.pcp * d.dcp > 1 and "return-routed-experts" in d.features,
        "no returned experts",
        ("features", *WORLD),
    ),
    Rule(
        "vllm-dcp-hisparse",
        "dcp={d.dcp} with HiSparse",
        VLLM,
        lambda d: d.dcp > 1 and "hisparse" in d.features,
        "dcp 1, or HiSparse off",
        ("features", "dcp"),
    ),
)
