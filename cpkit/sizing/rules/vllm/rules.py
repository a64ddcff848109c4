"""What vLLM 0.33.0 refuses under context parallelism, and what holds besides."""

from cpkit.sizing.rules.rule import Note
from cpkit.sizing.rules.vllm import nixl, v41
from cpkit.sizing.rules.vllm.backends import BACKEND_RULES
from cpkit.sizing.rules.vllm.pcp import GRAPH_MODELS, PCP_RULES
from cpkit.sizing.rules.vllm.sizes import INDEXER_RULES, SIZE_RULES

RULES = (*SIZE_RULES, *PCP_RULES, *BACKEND_RULES, *INDEXER_RULES, *nixl.RULES, *v41.RULES)

NOTES = (
    Note(
        "vllm-pcp-graphs-off",
        "no graphs are captured: PCP of sparse MLA without DCP captures those of deepseek_v32 and glm_moe_dsa alone",
        "pcp_manager.py",
        lambda d: (
            d.pcp > 1
            and d.dcp == 1
            and d.graphs is None
            and d.index_topk > 0
            and d.model.model_type not in GRAPH_MODELS
        ),
    ),
    Note(
        "vllm-prefix-unit",
        "prefix-cache hits land on block_size * dcp = {d.block_size} * {d.dcp} tokens",
        "single cache group",
        lambda d: d.dcp > 1 and d.prefix_caching,
    ),
    Note(
        "vllm-pcp-full-kv",
        "PCP saves no memory: with dcp=1 every rank keeps all keys",
        "pcp_manager.py",
        lambda d: d.pcp > 1 and d.dcp == 1,
    ),
    Note(
        "vllm-replicated-groups",
        "caches of linear layers (like those of windows) are replicated over a DCP group, or refused: it was not run",
        "config/vllm.py",
        lambda d: d.dcp > 1 and any(layer.kind == "linear" for layer in d.model.layers),
    ),
    Note(
        "vllm-nixl-interleave",
        "NIXL sets the interleave to the block size, {d.block_size}",
        "config/vllm.py",
        lambda d: d.kv_transfer == "nixl" and d.dcp > 1,
    ),
    Note(
        "vllm-interleave-drafts",
        "interleave {d.interleave} with {d.speculation} speculation: the backend must allow the two together; whether "
        "{d.attention_backend} does was not read",
        "worker/cp_utils.py",
        lambda d: d.dcp > 1 and d.interleave > 1 and d.speculation is not None,
    ),
)
