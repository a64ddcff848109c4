"""Published capacities and refusals beside what cpkit counts from the same inputs."""

from dataclasses import dataclass

from cpkit.model import load_config, load_model, published_fields
from cpkit.sizing.chips import chip
from cpkit.sizing.deployment import Deployment
from cpkit.sizing.memory.deployment import Limits, memory_of
from cpkit.sizing.rules.engines import broken_rules
from cpkit.sizing.verdict import token_bytes


@dataclass(frozen=True)
class Published:
    """One published number. within: the share that ours may differ by; None where an input is not known."""

    what: str
    published: float
    ours: float
    within: float | None
    inputs: str
    source: str
    unit: str = "×"

    @property
    def difference(self):
        return self.ours / self.published - 1


@dataclass(frozen=True)
class Answer:
    """One published refusal or permission."""

    model: str
    tp: int
    pcp: int
    dcp: int
    published: bool
    rules: tuple[str, ...]

    @property
    def ours(self):
        return not self.rules


def deployment(model, engine="vllm", **settings):
    usual = {"tp": 8, "attention_backend": {"vllm": "flashmla-sparse", "sglang": "trtllm"}[engine]}
    return Deployment(engine=engine, model=load_model(model), chip=chip("b200"), **{**usual, **settings})


def stripe(model, dcp, engine="vllm", **settings):
    """How much less of a token's cache a rank keeps under dcp."""
    one, many = (token_bytes(deployment(model, engine, dcp=size, **settings)) for size in (1, dcp))
    return one / many


def room(model, dcp):
    """How many more tokens there is room for under dcp, buffers of the largest steps deducted."""
    limits = Limits(published_fields(*load_config(model)), load_model(model).max_model_len)
    one, many = (memory_of(deployment(model, dcp=size), limits) for size in (1, dcp))
    return many.tokens / one.tokens


STRIPES = {2: 1.98, 4: 3.96, 8: 7.85}
AISIMULATE = "ai-dynamo/aisimulate pull 240"
SKIPPED = "sgl-project/sglang pull 30531, a comment"
READ = "read in vllm 0.33.0 and sglang 0.5.23"


def figures():
    for dcp, published in STRIPES.items():
        yield Published(
            f"KV capacity, dcp {dcp} against 1: share of a token that a rank keeps",
            published,
            stripe("deepseek-v3.2", dcp),
            0.03,
            "8 x B200, tp 8; any model whose caches are all sharded",
            AISIMULATE,
        )
    for dcp, published in STRIPES.items():
        yield Published(
            f"KV capacity, dcp {dcp} against 1: tokens in the memory that is left",
            published,
            room("deepseek-v3.2", dcp),
            None,
            "8 x B200, tp 8; model and step size not published: deepseek-v3.2, 8,192 tokens a step, fp32 outputs",
            AISIMULATE,
        )
    for model, replicated in (("deepseek-v3.2", 3.7), ("glm-5.2", 5.9)):
        yield Published(
            f"{model}, dcp 8, indexer keys sharded", 8.0, stripe(model, 8), 0.03, "656 + 132 B a token", READ
        )
        yield Published(
            f"{model}, dcp 8, indexer keys replicated",
            replicated,
            stripe(model, 8, "sglang"),
            0.03,
            "656 B a layer, 132 B a layer with an indexer",
            READ,
        )
    for model, published, layers in (("glm-5.2", 47_702, 21), ("glm-5", 55_225, 78)):
        yield Published(
            f"SGLang, bytes of a token with indexer keys in {layers} of 78 layers",
            published,
            token_bytes(deployment(model, "sglang", kv_cache_dtype="fp8_e4m3")),
            0.03,
            "GLM-5.2 NVFP4, tp 4, trtllm's fp8 rows of 576 B; before the pull all layers kept them, as GLM-5's do",
            SKIPPED,
            unit="B",
        )
    yield Published(
        "SGLang, a draft layer's part of the keys: 1.98 of 133.40 GB",
        1.98 / 133.40,
        draft_share("glm-5.2", kv_cache_dtype="fp8_e4m3"),
        0.03,
        "GLM-5.2 NVFP4, tp 4, trtllm, EAGLE",
        SKIPPED,
        unit="",
    )
    yield Published(
        "SGLang KV capacity, dcp 2 against 1 (2,292,288 to 4,252,416 tokens)",
        4_252_416 / 2_292_288,
        stripe("glm-5.2", 2, "sglang", kv_cache_dtype="fp8_e4m3"),
        0.03,
        "tp 8, trtllm's fp8 rows; which of its models, and whether with drafts, is not published: glm-5.2 without",
        "sgl-project/sglang pull 31821",
    )
    yield Published(
        "SGLang KV capacity, dcp 8 against 1 (235,456 to 756,224 tokens)",
        756_224 / 235_456,
        stripe("glm-5", 8, "sglang", kv_cache_dtype="fp8_e4m3", attention_backend="flashmla-kv", speculation="eagle"),
        None,
        "8 x H100, tp 8, fp8 rows of 656 B, GLM-5.3 with EAGLE on a base of v0.5.17, where all 78 layers kept indexer "
        "keys (as GLM-5's do); what else DCP allocates is not published",
        "sgl-project/sglang pull 39330, a comment",
    )


def draft_share(model, **settings):
    """Bytes of a draft layer over those of the model's own."""
    plain, drafting = (
        token_bytes(deployment(model, "sglang", speculation=word, **settings)) for word in (None, "eagle")
    )
    return drafting / plain - 1


ANSWERS = (
    ("deepseek-v3.2", 8, 1, (2, 4), (8,)),
    ("deepseek-v3.2", 4, 1, (), (2, 4)),
    ("deepseek-v3.2", 2, 4, (4,), (8,)),
    ("glm-5.2", 8, 1, (2, 4, 8), ()),
    ("glm-5.2", 4, 1, (2, 4), ()),
    ("glm-5.2", 2, 1, (), (2,)),
)
"""model, tp, pcp, dcp that FlashMLA sparse of vLLM 0.33.0 takes, dcp that it refuses."""


def answers():
    for model, tp, pcp, taken, refused in ANSWERS:
        for dcp in sorted((*taken, *refused)):
            merge = "ag_rs" if pcp > 1 else None
            broken = broken_rules(deployment(model, tp=tp, pcp=pcp, dcp=dcp, merge=merge))
            yield Answer(model, tp, pcp, dcp, dcp in taken, tuple(rule.id for rule in broken))
