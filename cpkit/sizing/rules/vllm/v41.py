"""What vLLM 0.33.0 refuses for DeepSeek-V4.1."""

from cpkit.sizing.deployment import Deployment
from cpkit.sizing.rules.rule import Rule

WHERE = "models/deepseek_v41/attention.py"


def _pcp(d: Deployment) -> bool:
    return d.model.model_type == "deepseek_v41" and d.pcp > 1


def _has_extras(d: Deployment) -> bool:
    """Something that PCP of V4.1 does not go with."""
    switched = {"dual-batch-overlap", "mega-moe"} & d.features
    return d.speculation is not None or d.kv_transfer is not None or bool(switched)


RULES = (
    Rule(
        "vllm-v41-dcp",
        "dcp={d.dcp} with {d.model.name}: selection inside candidates of an earlier layer takes dcp 1",
        WHERE,
        lambda d: d.model.model_type == "deepseek_v41" and d.dcp > 1,
        "dcp 1",
        ("dcp",),
    ),
    Rule(
        "vllm-v41-pcp-chip",
        "pcp={d.pcp} of {d.model.name} on {d.chip.name}: NVIDIA only",
        WHERE,
        lambda d: _pcp(d) and d.chip is not None and not d.chip.is_nvidia,
        "pcp 1",
        ("pcp",),
    ),
    Rule(
        "vllm-v41-pcp-backend",
        "pcp={d.pcp} of {d.model.name} with backend {d.attention_backend}: FlashMLA sparse only",
        WHERE,
        lambda d: _pcp(d) and d.attention_backend != "flashmla-sparse",
        "--attention-backend flashmla-sparse",
        ("attention_backend", "pcp"),
    ),
    Rule(
        "vllm-v41-pcp-sizes",
        "pcp={d.pcp} of {d.model.name} with pp={d.pp} dp={d.dp}: both must be 1",
        WHERE,
        lambda d: _pcp(d) and d.pp * d.dp > 1,
        "pp 1 and dp 1",
        ("pp", "dp", "pcp"),
    ),
    Rule(
        "vllm-v41-pcp-extras",
        "pcp={d.pcp} of {d.model.name} with microbatching, speculation ({d.speculation}), KV transfer "
        "({d.kv_transfer}) or mega-MoE",
        WHERE,
        lambda d: _pcp(d) and _has_extras(d),
        "pcp without any of these",
        ("speculation", "kv_transfer", "features", "pcp"),
    ),
    Rule(
        "vllm-v41-pcp-prefix",
        "pcp={d.pcp} of {d.model.name} with prefix caching and a replay window of {d.replay_window} tokens: prefix "
        "caching goes with bounded window replay alone, of at least 2 * pcp tokens",
        WHERE,
        lambda d: _pcp(d) and d.prefix_caching and d.replay_window < 2 * d.pcp,
        "--no-enable-prefix-caching, or a replay window of at least 2 * pcp",
        ("prefix_caching", "replay_window", "pcp"),
    ),
)
