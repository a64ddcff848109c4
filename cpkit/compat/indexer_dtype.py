"""Upstream's choice of the indexer's cache dtype, from a plain config object over cpkit.builders.indexer_dtype."""

from dataclasses import dataclass

from cpkit.builders.chip import Chip
from cpkit.builders.indexer_dtype import indexer_uses_fp4

FP4_MODELS_ON_ROCM = ("deepseek_v41",)
"""Upstream's base revision; cpkit's builders follow the later rule, which has deepseek_v4 too."""


@dataclass(frozen=True)
class IndexerCacheConfig:
    """What the choice depends on.

    indexer_kv_dtype: "auto" (fp8), "fp8" or "mxfp4". platform: "cuda", "rocm", "xpu" or "cpu". capability_family: CUDA
    family (80, 90, 100, 120). model_type: of the model config, None without one. cdna_version, aiter_enabled: of a ROCm
    machine.
    """

    indexer_kv_dtype: str
    platform: str
    capability_family: int | None = None
    model_type: str | None = None
    cdna_version: int | None = None
    aiter_enabled: bool | None = None


def dsa_indexer_uses_fp4(config: IndexerCacheConfig) -> bool:
    """Whether the indexer's keys are kept in mxfp4; raises ConfigError where that cannot work, with the reason."""
    chip = Chip(
        config.platform,
        family=config.capability_family,
        cdna=config.cdna_version,
        kernel_library=bool(config.aiter_enabled),
    )
    return indexer_uses_fp4(
        config.indexer_kv_dtype, chip, model_type=config.model_type, models_on_rocm=FP4_MODELS_ON_ROCM
    )
