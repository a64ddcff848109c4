"""Which dtype indexer keys are kept in: a table of every name, platform and model."""

import pytest

from cpkit.builders.chip import Chip
from cpkit.builders.indexer_dtype import indexer_uses_fp4
from cpkit.errors import ConfigError

CHIPS = {
    "cpu": Chip("cpu"),
    "xpu": Chip("xpu"),
    **{f"sm_{family}": Chip("cuda", family=family) for family in (80, 90, 100, 120)},
    "mi350": Chip("rocm", cdna=4, kernel_library=True),
    "mi350-no-library": Chip("rocm", cdna=4),
    "mi300": Chip("rocm", cdna=3, kernel_library=True),
}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("name", ["auto", "fp8"])
@pytest.mark.parametrize("model", [None, "deepseek_v32", "deepseek_v41"])
def test_fp8_works_everywhere(chip, name, model):
    assert not indexer_uses_fp4(name, chip, model_type=model)


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "", "FP8"])
def test_other_names_are_refused(name):
    for chip in CHIPS.values():
        with pytest.raises(ConfigError, match="use one of auto, fp8, mxfp4"):
            indexer_uses_fp4(name, chip, model_type="deepseek_v41")


@pytest.mark.parametrize(
    ("chip", "model", "reason"),
    [
        ("sm_100", None, None),
        ("sm_100", "deepseek_v32", None),
        ("mi350", "deepseek_v41", None),
        ("mi350", "deepseek_v4", None),
        ("mi350", "deepseek_v32", "with model type deepseek_v32"),
        ("mi350", None, "with model type None"),
        ("mi300", "deepseek_v41", "on ROCm CDNA3: it needs CDNA4"),
        ("mi350-no-library", "deepseek_v41", "without its kernel library"),
        ("sm_80", "deepseek_v41", "on cuda family 80"),
        ("sm_90", "deepseek_v41", "on cuda family 90"),
        ("sm_120", "deepseek_v41", "on cuda family 120"),
        ("xpu", "deepseek_v41", "on xpu: it needs CUDA family 100"),
        ("cpu", "deepseek_v41", "on cpu: it needs CUDA family 100"),
    ],
)
def test_mxfp4(chip, model, reason):
    if reason is None:
        assert indexer_uses_fp4("mxfp4", CHIPS[chip], model_type=model)
    else:
        with pytest.raises(ConfigError, match=reason):
            indexer_uses_fp4("mxfp4", CHIPS[chip], model_type=model)
