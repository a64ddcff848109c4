"""Attention backends: which of them take which context parallelism. None: not known."""

from dataclasses import dataclass

from cpkit.sizing.deployment import Deployment


@dataclass(frozen=True, slots=True)
class Backend:
    """What one attention backend of an engine declares.

    sparse: it attends selected keys. dcp, pcp: it runs with either; both: with the two together. interleaves: it takes
    an interleave above 1 under DCP. platforms: of nvidia and amd, where it runs; archs: nvidia architectures, () any.
    """

    engine: str
    name: str
    source: str
    sparse: bool = True
    dcp: bool | None = None
    pcp: bool | None = None
    both: bool | None = None
    interleaves: bool = True
    platforms: tuple[str, ...] = ("nvidia",)
    archs: tuple[str, ...] = ()


HOPPER_UP = ("sm_90", "sm_100")
BLACKWELL = ("sm_100",)

BACKENDS = (
    Backend(
        "vllm", "flashmla-sparse", "backends/mla/flashmla_sparse.py", dcp=True, pcp=True, both=True, archs=HOPPER_UP
    ),
    Backend(
        "vllm",
        "flashinfer-mla-sparse",
        "backends/mla/flashinfer_mla_sparse.py",
        dcp=True,
        pcp=True,
        both=False,
        archs=BLACKWELL,
    ),
    Backend(
        "vllm",
        "flashinfer-mla",
        "backends/mla/flashinfer_mla.py",
        sparse=False,
        dcp=True,
        interleaves=False,
        archs=BLACKWELL,
    ),
    Backend("vllm", "flash-attn-mla-sparse", "attention/backend.py", dcp=False),
    Backend("vllm", "rocm-aiter-mla-sparse", "attention/backend.py", dcp=False, platforms=("amd",)),
    Backend("vllm", "b12x-mla-sparse", "attention/backend.py", dcp=False),
    Backend("sglang", "trtllm", "DSA attention backends", dcp=True, pcp=True, both=False, archs=BLACKWELL),
    Backend("sglang", "flashmla-sparse", "DSA attention backends", dcp=False, pcp=True, archs=HOPPER_UP),
    Backend("sglang", "flashmla-kv", "DSA attention backends", dcp=False, pcp=True, archs=HOPPER_UP),
    Backend("sglang", "fa3", "DSA attention backends", dcp=False, archs=("sm_90",)),
    Backend("sglang", "tilelang", "DSA attention backends", dcp=False, platforms=("nvidia", "amd")),
)
"""vllm: what each declares in its sources. sglang: DCP for DSA is on its trtllm backends alone in 0.5.23."""

PATCHED = ("-dsv4", "-sm120")
"""Endings of names that only say which model or chip a backend was adapted to."""


def backend(engine: str, name: str | None) -> Backend | None:
    """An engine's backend by name in either spelling (FLASHMLA_SPARSE, flashmla-sparse), or None."""
    if name is None:
        return None
    plain = name.lower().replace("_", "-")
    for ending in PATCHED:
        plain = plain.removesuffix(ending)
    return next((it for it in BACKENDS if it.engine == engine and it.name == plain), None)


def backend_names(engine: str) -> list[str]:
    """Names of an engine's backends."""
    return [it.name for it in BACKENDS if it.engine == engine]


def runs_on_chip(deployment: Deployment) -> bool:
    """The chip has kernels of the deployment's backend; true where either is not known."""
    known, chip = backend(deployment.engine, deployment.attention_backend), deployment.chip
    if known is None or chip is None:
        return True
    if not chip.is_nvidia:
        return "amd" in known.platforms
    return "nvidia" in known.platforms and (not known.archs or chip.arch in known.archs)
