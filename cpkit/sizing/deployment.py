"""A deployment as an engine is started with it, before anybody asks whether it can work.

Sizes are the engine's own flags. Who counts what differs:

              ranks of a replica    heads are split over     pcp
    vllm      tp * pcp              tp                       multiplies the world
    sglang    tp                    tp / pcp / attn_dp       divides tp (attn-cp-size)
    cpkit     tp * pcp              tp                       multiplies the world
"""

import math
from dataclasses import dataclass, field

from cpkit.errors import ConfigError
from cpkit.model import Model
from cpkit.sizing.chips import Chip
from cpkit.topology import Topology, gathered_heads

ENGINES = {"vllm": "vllm 0.33.0", "sglang": "sglang 0.5.23", "cpkit": "cpkit"}
"""Engines and the versions whose rules are known."""

SPECULATIONS = ("mtp", "dspark", "eagle", "ngram", "draft-model", "medusa", "suffix")
"""Ways to make drafts; the rules tell MTP and DSpark from the others."""

GRAPHS = ("none", "piecewise", "full_decode_only", "full", "full_and_piecewise")
KV_ROLES = ("both", "producer", "consumer")
KV_CACHE_DTYPES = ("fp8_ds_mla", "nvfp4_ds_mla", "fp8", "fp8_e4m3", "fp8_e5m2", "bf16")
"""Caches whose rows are known: the family's fp8 record under its names, bf16 values, and for dsa layers nvfp4."""

FEATURES = {
    "direct-dcp": "DCP collectives over NVLink multicast",
    "dual-batch-overlap": "microbatches that overlap compute and communication",
    "encoder-decoder": "an encoder-decoder model",
    "fp16-logits": "indexer logits that are not fp32",
    "hicache": "hierarchical KV cache",
    "hisparse": "hierarchical sparse KV cache",
    "lora": "LoRA adapters",
    "mega-moe": "fused MoE with its own exchange",
    "model-runner-v1": "the older model runner",
    "multimodal": "multimodal input",
    "no-cutedsl": "CuteDSL is not installed",
    "replicated-queries": "every DCP rank projects all query heads itself",
    "return-routed-experts": "returning the experts that tokens were routed to",
}
"""What may be switched on beside sizes, and what it means."""

KERNEL_HEADS = (64, 128)
"""Head counts that FlashMLA's sparse decode kernels are built for; others are padded up."""


@dataclass(frozen=True)
class Deployment:
    """What the rules look at. Raises ConfigError for sizes below 1 and for words that are not known.

    tp, pcp, dcp, pp, dp: as the engine counts them. interleave, block_size: tokens. attention_backend: its name, None
    where the engine has no choice. kv_cache_dtype: one of KV_CACHE_DTYPES. merge: ag_rs, a2a or fi_a2a; None: the
    engine's default. graphs: one of GRAPHS; None: left to the engine. speculation: one of SPECULATIONS; None: none.
    draft_modules: modules of an MTP draft. kv_transfer: connector (nixl, mooncake), None. kv_role: one of KV_ROLES.
    remote_dcp: dcp of the other side of a transfer, 0 unknown. kv_heads: of a GQA model, 0 for one latent (MLA).
    replay_window: tokens of bounded window replay, 0 without. features: names out of FEATURES.
    sglang alone: prefill_cp: prefill CP is switched on; cp_strategy: zigzag, interleave, None; attn_dp, moe_dp: data
    parallel attention and MoE inside tp; moe_a2a: MoE exchange backend; kv_saving: layer-split, kv-sharding, None;
    disaggregation: prefill, decode, None; eagle_topk: branches of an EAGLE draft.
    """

    engine: str
    model: Model
    chip: Chip | None = None
    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    pp: int = 1
    dp: int = 1
    interleave: int = 1
    block_size: int = 64
    attention_backend: str | None = None
    kv_cache_dtype: str = "fp8_ds_mla"
    merge: str | None = None
    graphs: str | None = None
    speculation: str | None = None
    draft_modules: int = 1
    kv_transfer: str | None = None
    kv_role: str = "both"
    remote_dcp: int = 0
    kv_heads: int = 0
    prefix_caching: bool = True
    replay_window: int = 0
    features: frozenset[str] = field(default_factory=frozenset)
    prefill_cp: bool = False
    cp_strategy: str | None = None
    attn_dp: int = 1
    moe_dp: int = 1
    moe_a2a: str = "none"
    kv_saving: str | None = None
    disaggregation: str | None = None
    eagle_topk: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pcp", "dcp", "pp", "dp", "interleave", "block_size", "attn_dp", "moe_dp", "draft_modules"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 1 << 20:
                raise ConfigError(f"{name}={size!r}: every size is a whole number from 1 to 2^20")
        allowed = {
            "engine": tuple(ENGINES),
            "kv_cache_dtype": KV_CACHE_DTYPES,
            "graphs": (None, *GRAPHS),
            "speculation": (None, *SPECULATIONS),
            "kv_role": KV_ROLES,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: use one of {', '.join(map(str, filter(None, values)))}"
                )
        compressed = [layer.kind for layer in self.model.layers if layer.kind not in ("dsa", "linear")]
        if self.kv_cache_dtype == "nvfp4_ds_mla" and compressed:
            raise ConfigError(
                f"kv_cache_dtype=nvfp4_ds_mla with {compressed[0]} layers: its rows are known for dsa alone"
            )
        if unknown := sorted(self.features - FEATURES.keys()):
            raise ConfigError(f"unknown feature {unknown[0]!r}: use one of {', '.join(FEATURES)}")

    @property
    def num_gpus(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp if self.engine == "sglang" else self.dp * self.pp * self.pcp * self.tp

    @property
    def head_ranks(self) -> int:
        """Ranks that split the heads."""
        return max(self.tp // self.pcp // self.attn_dp, 1) if self.engine == "sglang" else self.tp

    @property
    def local_heads(self) -> int:
        """Heads of one rank."""
        return max(self.model.num_heads // self.head_ranks, 1)

    @property
    def gathered_heads(self) -> int:
        """Heads that a rank scores its shard of keys with."""
        return gathered_heads(self.local_heads, tp=self.head_ranks, pcp=self.pcp, dcp=self.dcp)

    @property
    def local_kernel_heads(self) -> int:
        """Heads of one rank, padded to the kernel's."""
        return kernel_heads(self.local_heads)

    @property
    def gathered_kernel_heads(self) -> int:
        """Gathered heads, padded to the kernel's."""
        return kernel_heads(self.gathered_heads)

    @property
    def key_ratio(self) -> int:
        """Tokens that one key, or one pool of keys that an indexer scores, stands for; of the coarsest cache."""
        return math.lcm(*self.model.slot_ratios) if self.model.slot_ratios else 1

    @property
    def compresses(self) -> bool:
        """Keys of the main cache stand for several tokens each (DeepSeek-V4 and V4.1)."""
        return self.model.model_type in ("deepseek_v4", "deepseek_v41")

    @property
    def index_topk(self) -> int:
        """Keys, or pools of keys, that the indexer picks; 0 without an indexer."""
        return max((layer.index.topk for layer in self.model.layers if layer.index), default=0)

    @property
    def pools(self) -> bool:
        """The indexer scores pools of keys (kpool)."""
        return bool(self.model.pool_ratios)

    @property
    def reduction(self) -> str:
        """How partial outputs are merged: what was asked for, else the engine's default for the model."""
        if self.merge is not None:
            return self.merge
        if self.engine == "vllm" and self.model.model_type == "glm_moe_dsa":
            return "a2a"
        if self.engine == "sglang":
            return "fi_a2a" if self.chip is not None and self.chip.is_blackwell else "a2a"
        return "ag_rs"

    @property
    def replicates_index(self) -> bool:
        """Every rank of a DCP group keeps all indexer keys, and all keys of draft modules."""
        return replicates_index(self.engine, self.dcp)

    @property
    def draft_layers(self) -> int:
        """Layers of draft modules, which keep keys of every token: of MTP, SGLang's EAGLE; others' are not known."""
        if self.speculation == "mtp":
            return self.draft_modules
        return int(self.speculation == "eagle" and self.engine == "sglang")

    @property
    def plain_fp8(self) -> bool:
        """Rows are fp8 values without scales of their own, the rotary part too (trtllm's)."""
        return (
            self.engine == "sglang" and self.attention_backend == "trtllm" and self.kv_cache_dtype.startswith("fp8_e")
        )

    def topology(self) -> Topology:
        """The world as the planner sees it; raises ConfigError where there is none."""
        if self.engine == "sglang":
            return Topology(self.attn_dp, self.pp, self.pcp, self.head_ranks, self.dcp, 1, self.block_size)
        unused = self.engine == "vllm" and self.dcp == 1  # vllm looks at the interleave under DCP alone
        interleave = 1 if unused else self.interleave
        return Topology(self.dp, self.pp, self.pcp, self.tp, self.dcp, interleave, self.block_size)


def replicates_index(engine: str | None, dcp: int) -> bool:
    """An engine's DCP ranks keep all indexer keys each, and select among all of them without an exchange."""
    return engine == "sglang" and dcp > 1


def draft_layer(model: Model) -> int:
    """Place in model.layers of the kind that a draft module has: the first that selects its own keys, else the last."""
    selecting = (at for at, layer in enumerate(model.layers) if layer.index and layer.runs_index)
    return next(selecting, len(model.layers) - 1)


def kernel_heads(heads: int) -> int:
    """Heads after padding; more than the largest kernel has stay as they are.  16 -> 64, 65 -> 128"""
    return next((size for size in KERNEL_HEADS if heads <= size), heads)
