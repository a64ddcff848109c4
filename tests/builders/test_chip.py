"""What chips have: native decode widths, per-token kernels, schedules; and the decode path that follows."""

import pytest
import torch

from cpkit.builders.chip import Chip, chip_of
from cpkit.builders.indexer_decode import DecodePath, fixed_path, step_path
from cpkit.errors import ConfigError

A100, HOPPER, BLACKWELL, CONSUMER = (Chip("cuda", family=family) for family in (80, 90, 100, 120))
MI350, XPU, CPU = Chip("rocm", cdna=4), Chip("xpu"), Chip("cpu")


@pytest.mark.parametrize(
    ("chip", "widths"),
    [
        pytest.param(A100, {0, 1, 2}, id="a100"),
        pytest.param(HOPPER, {0, 1, 2, 4}, id="hopper"),
        pytest.param(BLACKWELL, set(range(9)), id="blackwell"),
        pytest.param(CONSUMER, {0, 1, 2}, id="sm_120"),
        pytest.param(MI350, {0, 1, 2}, id="rocm"),
        pytest.param(XPU, {0, 1, 2}, id="xpu"),
        pytest.param(CPU, {0, 1, 2}, id="cpu"),
    ],
)
def test_native_widths(chip, widths):
    assert {n for n in range(9) if chip.has_native_width(n)} == widths


@pytest.mark.parametrize(
    ("chip", "drafts", "adaptive", "longest", "path"),
    [
        pytest.param(BLACKWELL, 0, False, 1, DecodePath.PER_TOKEN, id="blackwell"),
        pytest.param(BLACKWELL, 6, True, 3, DecodePath.PER_TOKEN, id="blackwell-adaptive"),
        pytest.param(HOPPER, 3, False, 4, DecodePath.NATIVE, id="hopper-4"),
        pytest.param(HOPPER, 3, False, 3, DecodePath.FLAT, id="b87-hopper-3-of-4"),
        pytest.param(HOPPER, 3, False, 2, DecodePath.NATIVE, id="hopper-2-of-4"),
        pytest.param(HOPPER, 3, False, 0, DecodePath.NATIVE, id="hopper-empty"),
        pytest.param(HOPPER, 2, False, 2, DecodePath.FLAT, id="hopper-3-configured"),
        pytest.param(HOPPER, 1, True, 1, DecodePath.FLAT, id="hopper-adaptive"),
        pytest.param(A100, 1, True, 2, DecodePath.NATIVE, id="a100-adaptive"),
        pytest.param(A100, 3, False, 1, DecodePath.FLAT, id="a100-4-configured"),
        pytest.param(MI350, 0, False, 1, DecodePath.NATIVE, id="rocm"),
    ],
)
def test_the_decode_path(chip, drafts, adaptive, longest, path):
    assert step_path(fixed_path(chip, drafts, adaptive=adaptive), chip, longest) is path


def test_schedules_of_the_window_kernels():
    taking = [chip for chip in (A100, HOPPER, BLACKWELL, CONSUMER, MI350, XPU, CPU) if chip.takes_window_schedules]
    assert taking == [A100, HOPPER, BLACKWELL, CPU]


def test_chips_that_do_not_exist():
    with pytest.raises(ConfigError, match="platform 'tpu': use one of cuda, rocm, xpu, cpu"):
        Chip("tpu")
    with pytest.raises(ConfigError, match="CUDA chips have one, others none"):
        Chip("cuda")
    with pytest.raises(ConfigError, match="family=103: it is rounded down to tens; pass 100"):
        Chip("cuda", family=103)
    with pytest.raises(ConfigError, match="num_workers=0"):
        Chip("cpu", num_workers=0)


def test_the_host_is_a_chip():
    assert chip_of(torch.device("cpu")) == CPU
    with pytest.raises(ConfigError, match="pass Chip"):
        chip_of(torch.device("xpu"))
