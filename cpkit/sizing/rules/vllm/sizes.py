"""What vLLM 0.33.0 refuses about sizes: dcp, heads, interleave, and the merge of the indexer's selections."""

from cpkit.sizing.deployment import Deployment
from cpkit.sizing.rules.rule import Rule

PARALLEL, VLLM, MODEL = "config/parallel.py", "config/vllm.py", "config/model.py"
INDEXER, SELECT = "indexer.py", "sparse_attn_indexer.py"
MERGED_TOPK = (512, 1024, 2048)


def _merges_selections(d: Deployment) -> bool:
    return d.dcp > 1 and d.index_topk > 0


SIZE_RULES = (
    Rule(
        "vllm-dcp-tp",
        "tp={d.tp} is not a multiple of dcp={d.dcp}: without PCP a DCP group is cut out of the TP group",
        PARALLEL,
        lambda d: d.pcp == 1 and d.tp % d.dcp > 0,
        "a dcp that divides tp",
        ("dcp", "tp"),
    ),
    Rule(
        "vllm-dcp-pcp",
        "dcp={d.dcp} with tp={d.tp} pcp={d.pcp}: under PCP dcp is 1, pcp or tp * pcp",
        PARALLEL,
        lambda d: d.pcp > 1 and d.dcp not in (1, d.pcp, d.tp * d.pcp),
        "dcp 1, pcp or tp * pcp",
        ("tp", "pcp", "dcp"),
    ),
    Rule(
        "vllm-heads-tp",
        "{d.model.num_heads} heads do not divide over tp={d.tp}",
        MODEL,
        lambda d: d.model.num_heads % d.tp > 0,
        "a tp that divides the heads",
        ("tp",),
    ),
    Rule(
        "vllm-gqa-tp",
        "dcp={d.dcp} with tp={d.tp} and {d.kv_heads} KV heads: dcp > 1 shares out what TP would repeat, so tp must be "
        "above the KV heads, and dcp at most tp // KV heads",
        MODEL,
        lambda d: d.kv_heads > 0 and d.dcp > 1 and (d.tp <= d.kv_heads or d.dcp > d.tp // d.kv_heads),
        "a smaller dcp or a larger tp (models with one latent head are exempt)",
        ("dcp", "tp"),
    ),
    Rule(
        "vllm-gqa-heads",
        "dcp={d.dcp} with {d.model.num_heads} query heads on {d.kv_heads} KV heads: dcp must divide their quotient",
        MODEL,
        lambda d: d.kv_heads > 0 and d.dcp > 1 and d.model.num_heads // d.kv_heads % d.dcp > 0,
        "a dcp that divides query heads / KV heads",
        ("dcp",),
    ),
    Rule(
        "vllm-interleave-block",
        "interleave={d.interleave} does not divide block_size={d.block_size}",
        VLLM,
        lambda d: d.dcp > 1 and d.block_size % d.interleave > 0,
        "an interleave that divides the block size",
        ("interleave", "block_size", "dcp"),
    ),
    Rule(
        "vllm-interleave-keys",
        "interleave={d.interleave} is not a multiple of {d.key_ratio}, the tokens that an indexer key of "
        "{d.model.name} stands for",
        INDEXER,
        lambda d: d.dcp > 1 and d.interleave % d.key_ratio > 0 and not d.compresses,
        "--cp-kv-cache-interleave-size {d.key_ratio}, or a multiple",
        ("interleave", "dcp"),
    ),
    Rule(
        "vllm-dcp-v4",
        "dcp={d.dcp} with {d.model.name}: DCP of DeepSeek-V4 is refused altogether",
        INDEXER,
        lambda d: d.dcp > 1 and d.model.model_type == "deepseek_v4",
        "dcp 1",
        ("dcp",),
    ),
    Rule(
        "vllm-a2a-heads",
        "reduction a2a over dcp={d.dcp}: the {d.model.num_heads} heads must divide over it",
        PARALLEL,
        lambda d: d.dcp > 1 and d.reduction == "a2a" and d.model.num_heads % d.dcp > 0,
        "a dcp that divides the heads, or --dcp-comm-backend ag_rs",
        ("merge", "dcp"),
    ),
    Rule(
        "vllm-merge-name",
        "reduction {d.reduction}: vLLM has ag_rs and a2a",
        PARALLEL,
        lambda d: d.reduction not in ("ag_rs", "a2a"),
        "--dcp-comm-backend ag_rs or a2a",
        ("merge",),
    ),
    Rule(
        "vllm-direct-ranks",
        "direct DCP collectives with dcp={d.dcp}: NVLink multicast needs at least 2 ranks",
        PARALLEL,
        lambda d: "direct-dcp" in d.features and d.dcp == 1,
        "dcp > 1, or the direct variants off",
        ("features", "dcp"),
    ),
)

INDEXER_RULES = (
    Rule(
        "vllm-merge-cuda",
        "dcp={d.dcp} on {d.chip.name}: the exact merge of the indexer's selections is CUDA only",
        SELECT,
        lambda d: _merges_selections(d) and d.chip is not None and not d.chip.is_nvidia,
        "dcp 1",
        ("dcp",),
    ),
    Rule(
        "vllm-merge-cutedsl",
        "dcp={d.dcp} without CuteDSL: the indexer's selections are merged by a kernel of it",
        SELECT,
        lambda d: _merges_selections(d) and "no-cutedsl" in d.features,
        "install CuteDSL",
        ("features", "dcp"),
    ),
    Rule(
        "vllm-merge-fp32",
        "dcp={d.dcp} with logits that are not fp32: the indexer's selections are merged by fp32 scores",
        SELECT,
        lambda d: _merges_selections(d) and "fp16-logits" in d.features,
        "fp32 logits",
        ("features", "dcp"),
    ),
    Rule(
        "vllm-merge-topk",
        f"dcp={{d.dcp}} for {{d.model.name}}, which selects {{d.index_topk}} keys or pools: the merge takes "
        f"{', '.join(map(str, MERGED_TOPK))}",
        SELECT,
        lambda d: _merges_selections(d) and d.index_topk not in MERGED_TOPK,
        "dcp 1",
        ("dcp",),
        derived=True,
    ),
)
