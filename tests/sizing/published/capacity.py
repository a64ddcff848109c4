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
    backend = {"vllm": "flashmla-sparse", "sglang": "trtllm"}[engine]
    return Deployment(
        engine=engine, model=load_model(model), chip=chip("b200"), attention_backend=backend, **{"tp": 8, **settings}
    )


def stripe(model, dcp, engine="vllm"):
    """How much less of a token's cache a rank keeps under dcp."""
    return token_bytes(deployment(model, engine)) / token_bytes(deployment(model, engine, dcp=dcp))


def room(model, dcp):
    """How many more tokens there is room for under dcp, buffers of the largest steps deducted."""
    limits = Limits(published_fields(*load_config(model)), load_model(model).max_model_len)
    one, many = (memory_of(deployment(model, dcp=size), limits) for size in (1, dcp))
    return many.tokens / one.tokens


STRIPES = {2: 1.98, 4: 3.96, 8: 7.85}
AISIMULATE = "ai-dynamo/aisimulate pull 240"
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
    yield Published(
        "SGLang KV capacity, dcp 2 against 1 (2,292,288 to 4,252,416 tokens)",
        4_252_416 / 2_292_288,
        stripe("glm-5.2", 2, "sglang"),
        0.03,
        "tp 8, fp8 cache; which of its models is not published: glm-5.2 (glm-5 and deepseek-v3.2 give 1.71)",
        "sgl-project/sglang pull 31821",
    )
    yield Published(
        "SGLang KV capacity, dcp 8 against 1 (235,456 to 756,224 tokens)",
        756_224 / 235_456,
        stripe("glm-5.3", 8, "sglang"),
        None,
        "8 x H100, tp 8, fp8 cache; what the engine allocates for dcp beside the cache is not published",
        "sgl-project/sglang pull 39330, a comment",
    )


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
