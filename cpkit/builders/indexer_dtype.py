"""Whether an indexer keeps its keys in mxfp4 or in fp8: decided once, from the configured name and the chip.

cache dtype    chip                                     keys in
auto, fp8      any                                      fp8
mxfp4          CUDA family 100 (datacenter Blackwell)   mxfp4
mxfp4          ROCm CDNA4, kernel library, V4 models    mxfp4
mxfp4          any other                                refused
other names    any                                      refused
"""

from cpkit.builders.chip import BLACKWELL, Chip
from cpkit.errors import ConfigError

FP4_MODELS_ON_ROCM = ("deepseek_v4", "deepseek_v41")
CDNA4 = 4


def indexer_uses_fp4(
    cache_dtype: str,
    chip: Chip,
    *,
    model_type: str | None,
    models_on_rocm: tuple[str, ...] = FP4_MODELS_ON_ROCM,
) -> bool:
    """True for mxfp4 keys, False for fp8; raises ConfigError where the chip has no kernel for them.

    model_type: of the model's config, None without one; models_on_rocm: those with kernels there. Only ROCm looks.
    """
    if cache_dtype in ("auto", "fp8"):
        return False
    refusal = f"indexer cache dtype {cache_dtype!r}"
    if cache_dtype != "mxfp4":
        raise ConfigError(f"{refusal}: the indexer keeps its keys in fp8 or mxfp4; use one of auto, fp8, mxfp4")
    if chip.platform == "rocm":
        if model_type not in models_on_rocm:
            raise ConfigError(
                f"{refusal} on ROCm with model type {model_type}: its kernels exist for "
                f"{', '.join(models_on_rocm)} alone; use fp8"
            )
        if chip.cdna != CDNA4:
            raise ConfigError(f"{refusal} on ROCm CDNA{chip.cdna}: it needs CDNA4; use fp8")
        if not chip.kernel_library:
            raise ConfigError(f"{refusal} on ROCm without its kernel library: enable the library or use fp8")
    elif chip.family != BLACKWELL:
        where = "" if chip.family is None else f" family {chip.family}"
        raise ConfigError(f"{refusal} on {chip.platform}{where}: it needs CUDA family 100 (sm_10x); use fp8")
    return True
