"""What vLLM 0.33.0 refuses where KV caches travel over NIXL."""

from cpkit.sizing.deployment import Deployment
from cpkit.sizing.rules.rule import Rule

WHERE = "config/vllm.py, nixl connector"


def _nixl(d: Deployment) -> bool:
    return d.kv_transfer == "nixl"


RULES = (
    Rule(
        "vllm-nixl-dcp",
        "NIXL with tp={d.tp} pcp={d.pcp} dcp={d.dcp}: dcp is 1 or max(tp, pcp)",
        WHERE,
        lambda d: _nixl(d) and d.dcp not in (1, max(d.tp, d.pcp)),
        "dcp 1 or max(tp, pcp)",
        ("dcp", "tp", "pcp", "kv_transfer"),
    ),
    Rule(
        "vllm-nixl-mla",
        "NIXL with dcp={d.dcp} and {d.kv_heads} KV heads: dcp > 1 needs MLA",
        WHERE,
        lambda d: _nixl(d) and d.dcp > 1 and d.kv_heads > 0,
        "dcp 1",
        ("dcp", "kv_transfer"),
    ),
    Rule(
        "vllm-nixl-pcp",
        "NIXL with pcp={d.pcp} as {d.kv_role}: PCP is for the producer alone",
        WHERE,
        lambda d: _nixl(d) and d.pcp > 1 and d.kv_role != "producer",
        "kv_role kv_producer, or pcp 1",
        ("kv_role", "pcp", "kv_transfer"),
    ),
    Rule(
        "vllm-nixl-both",
        "NIXL with pcp={d.pcp} and dcp={d.dcp} at tp={d.tp}: the two together need tp 1 and dcp = pcp",
        WHERE,
        lambda d: _nixl(d) and d.pcp > 1 and d.dcp > 1 and not (d.tp == 1 and d.dcp == d.pcp),
        "tp 1 and dcp = pcp, or one of the two",
        ("dcp", "pcp", "tp", "kv_transfer"),
    ),
    Rule(
        "vllm-nixl-sides",
        "NIXL between dcp={d.dcp} here and dcp={d.remote_dcp} there: one must divide the other",
        "nixl connector",
        lambda d: _nixl(d) and d.remote_dcp > 0 and max(d.dcp, d.remote_dcp) % min(d.dcp, d.remote_dcp) > 0,
        "a dcp that divides the other side's, or a multiple of it",
        ("dcp", "kv_transfer"),
    ),
)
