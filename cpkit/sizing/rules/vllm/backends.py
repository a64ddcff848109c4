"""What vLLM's attention backends refuse under context parallelism.

FlashMLA sparse under DCP scores a shard with the heads of the whole DCP group, and its kernels are built for 64 and 128
heads. The gathered heads must pad to the same width as a rank's own:

    deepseek-v3.2 (128 heads)    tp=8: 16 a rank -> 64    dcp=4: 64 -> 64    dcp=8: 128 -> 128, refused
    glm-5.2       (64 heads)     tp=8:  8 a rank -> 64    dcp=8: 64 -> 64
"""

from cpkit.sizing.deployment import Deployment
from cpkit.sizing.rules.backends import Backend, backend, backend_names, runs_on_chip
from cpkit.sizing.rules.rule import Rule

MIXED_BATCH_HEADS = 32
"""Ranks with fewer heads take the mixed-batch path, the one that returns what a merge needs."""

FLASHMLA = "backends/mla/flashmla_sparse.py"


def _known(d: Deployment) -> Backend | None:
    return backend("vllm", d.attention_backend)


def _declares_no(d: Deployment, what: str) -> bool:
    """The backend is known not to take this."""
    known = _known(d)
    return known is not None and getattr(known, what) is False


def _flashmla_dcp(d: Deployment) -> bool:
    known = _known(d)
    return d.dcp > 1 and known is not None and known.name == "flashmla-sparse"


BACKEND_RULES = (
    Rule(
        "vllm-backend-name",
        f"attention backend {{d.attention_backend}} is not known here; known: {', '.join(backend_names('vllm'))}",
        "attention/backend.py",
        lambda d: d.attention_backend is not None and _known(d) is None,
        "one of the known backends",
        ("attention_backend",),
    ),
    Rule(
        "vllm-backend-sparse",
        "attention backend {d.attention_backend} with {d.model.name}: its layers attend selected keys, which this "
        "backend does not",
        "attention/backend.py",
        lambda d: d.index_topk > 0 and _declares_no(d, "sparse"),
        "a sparse MLA backend",
        ("attention_backend",),
    ),
    Rule(
        "vllm-backend-chip",
        "attention backend {d.attention_backend} on {d.chip.name} ({d.chip.arch}): it has no kernels for this chip",
        "attention/backend.py",
        lambda d: not runs_on_chip(d),
        "another --attention-backend",
        ("attention_backend",),
    ),
    Rule(
        "vllm-backend-dcp",
        "dcp={d.dcp} with attention backend {d.attention_backend}, which does not declare DCP (it must return the LSE)",
        "worker/cp_utils.py, attention/backend.py",
        lambda d: d.dcp > 1 and _declares_no(d, "dcp"),
        "--attention-backend flashmla-sparse, or dcp 1",
        ("attention_backend", "dcp"),
    ),
    Rule(
        "vllm-backend-both",
        "pcp={d.pcp} with dcp={d.dcp} on attention backend {d.attention_backend}: it takes one or the other",
        "worker/cp_utils.py, attention/backend.py",
        lambda d: d.pcp > 1 and d.dcp > 1 and _declares_no(d, "both"),
        "--attention-backend flashmla-sparse, or pcp 1, or dcp 1",
        ("attention_backend", "pcp", "dcp"),
    ),
    Rule(
        "vllm-backend-interleave",
        "interleave={d.interleave} with dcp={d.dcp} on attention backend {d.attention_backend}: it takes 1",
        "attention/backend.py",
        lambda d: d.dcp > 1 and d.interleave > 1 and _declares_no(d, "interleaves"),
        "--cp-kv-cache-interleave-size 1",
        ("interleave", "attention_backend", "dcp"),
    ),
    Rule(
        "vllm-flashmla-dtype",
        "FlashMLA sparse with dcp={d.dcp} and a {d.kv_cache_dtype} cache: DCP needs fp8_ds_mla",
        FLASHMLA,
        lambda d: _flashmla_dcp(d) and d.kv_cache_dtype != "fp8_ds_mla",
        "--kv-cache-dtype fp8_ds_mla",
        ("kv_cache_dtype", "dcp", "attention_backend"),
        derived=True,
    ),
    Rule(
        "vllm-flashmla-heads",
        f"FlashMLA sparse with dcp={{d.dcp}} and {{d.local_heads}} heads a rank (tp={{d.tp}}): without PCP it needs "
        f"the mixed-batch path, which has fewer than {MIXED_BATCH_HEADS}",
        FLASHMLA,
        lambda d: _flashmla_dcp(d) and d.pcp == 1 and d.local_heads >= MIXED_BATCH_HEADS,
        f"a larger tp (fewer than {MIXED_BATCH_HEADS} heads a rank), or pcp > 1",
        ("tp", "dcp", "pcp", "attention_backend"),
        derived=True,
    ),
    Rule(
        "vllm-flashmla-padding",
        "FlashMLA sparse with tp={d.tp} pcp={d.pcp} dcp={d.dcp}: the {d.gathered_heads} heads that score a shard pad "
        "to {d.gathered_kernel_heads}, a rank's own {d.local_heads} to {d.local_kernel_heads}; the two must be equal",
        FLASHMLA,
        lambda d: _flashmla_dcp(d) and d.gathered_kernel_heads != d.local_kernel_heads,
        "a dcp with at most 64 gathered heads, or under PCP dcp = pcp",
        ("dcp", "tp", "pcp", "attention_backend"),
        derived=True,
    ),
)
