"""fp8 groups against e4m3 spelled out by hand in exact fractions."""

from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
import torch

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.fp8 import dequantize_fp8, quantize_fp8, round_up_pow2


def e4m3_numbers():
    """Every non-negative e4m3 number: 4 exponent bits of bias 7, 3 mantissa bits; the largest code is NaN."""
    subnormal = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)]
    normal = [(1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)]
    return (subnormal + normal)[:-1]


NUMBERS = e4m3_numbers()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")
QUIET = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""The interpreter divides as numpy does, which warns of NaN."""


def nearest_e4m3(value):
    """Round a fraction to e4m3, ties to the code that is even."""
    size = min(abs(value), NUMBERS[-1])
    above = bisect_left(NUMBERS, size)
    below = max(above - 1, 0)
    gap_above, gap_below = NUMBERS[above] - size, size - NUMBERS[below]
    code = above if gap_above < gap_below or (gap_above == gap_below and above % 2 == 0) else below
    return float(NUMBERS[code]) * (-1 if value < 0 else 1)


def slow_group(values, pow2):
    """Quantized numbers and scale of one group; the scale rounds to fp32, and so does each quotient."""
    amax = max([abs(v) for v in values])
    scale = np.float32(max(np.float32(amax), np.float32(1e-4))) / np.float32(448)
    if pow2:
        power = Fraction(2) ** -60
        while power < Fraction(float(scale)):
            power *= 2
        scale = np.float32(float(power))
    quotients = [np.float32(v) / scale for v in values]
    return [nearest_e4m3(Fraction(float(q))) for q in quotients], float(scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "dim", "group_size"),
    [
        pytest.param(0, 128, 128, id="no-tokens"),
        pytest.param(3, 128, 128, id="one-group-a-token"),
        pytest.param(2, 448, 64, id="seven-groups"),
        pytest.param(5, 6, 2, id="tiny-groups"),
    ],
)
def test_groups_round_as_by_hand(num_tokens, dim, group_size, dtype, pow2, backend):
    rng = np.random.default_rng(dim + num_tokens)
    spread = 10.0 ** rng.uniform(-7, 4, (num_tokens, 1))
    values = torch.from_numpy(rng.normal(size=(num_tokens, dim)) * spread).to(dtype)
    values = values.to(DEVICE)
    quantized, scales = quantize_fp8(values, group_size=group_size, pow2_scales=pow2, backend=backend)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.shape == values.shape
    assert scales.shape == (num_tokens, dim // group_size)
    for token in range(num_tokens):
        for group in range(dim // group_size):
            span = slice(group * group_size, (group + 1) * group_size)
            want, scale = slow_group(values[token, span].float().tolist(), pow2)
            assert float(scales[token, group]) == scale
            assert quantized[token, span].float().tolist() == want


def test_the_drawn_example():
    quantized, scales = quantize_fp8(torch.tensor([[7.0, -3.0, 0.5, 0.0]]), group_size=4)
    assert scales.tolist() == [[1 / 64]]
    assert quantized.float().tolist() == [[448.0, -192.0, 32.0, 0.0]]


@pytest.mark.parametrize("shift", [-6, 0, 5])
def test_whole_numbers_up_to_16_survive_pow2_scales(shift):
    values = torch.arange(-16, 17.0).repeat(9, 1)[:, :32] * 2.0**shift
    values[1:5] = values[1:5].clamp(-1 * 2.0**shift, 5 * 2.0**shift)
    values[8] = 0.0
    assert torch.equal(dequantize_fp8(*quantize_fp8(values, group_size=32, pow2_scales=True)), values)


@pytest.mark.parametrize("amax", [7.0, 14.0, 0.875, 0.0])
@pytest.mark.parametrize("pow2", [False, True])
def test_whole_multiples_survive_any_scale_when_the_largest_is_seven(amax, pow2):
    values = torch.arange(-7.0, 8.0).repeat(2, 1)[:, :14] * amax / 7
    assert torch.equal(dequantize_fp8(*quantize_fp8(values, group_size=14, pow2_scales=pow2)), values)


def test_whole_numbers_need_not_survive_another_largest():
    values = torch.tensor([[5.0, 3.0]])
    assert not torch.equal(dequantize_fp8(*quantize_fp8(values, group_size=2)), values)


@QUIET
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_infinity_stay_in_their_group(backend):
    values = torch.ones(1, 16, device=DEVICE)
    values[0, 0], values[0, 4], values[0, 8] = float("nan"), float("inf"), -float("inf")
    for pow2 in (False, True):
        quantized, scales = quantize_fp8(values, group_size=4, pow2_scales=pow2, backend=backend)
        back = dequantize_fp8(quantized, scales)
        assert quantized[0, :4].float().isnan().all() and scales[0, 0].isnan()
        assert back[0, 4:8].isnan().any() and back[0, 8:12].isnan().any() and scales[0, 1:3].isinf().all()
        assert (back[0, 12:] - 1).abs().max() < 0.07


@QUIET
def test_the_kernel_rounds_as_the_reference_at_every_e4m3_number_and_between_them():
    """A scale of 1, so that every number, every tie and the neighbours of both are quotients."""
    numbers = torch.tensor([float(n) for n in NUMBERS])
    ties = (numbers[1:] + numbers[:-1]) / 2
    around = [torch.nextafter(x, torch.tensor(y)) for x in (numbers, ties) for y in (-1e9, 1e9)]
    one_sided = torch.cat([numbers, ties, *around]).clamp(max=448.0)
    flat = torch.cat([one_sided, -one_sided, torch.tensor([float("nan")])])
    values = torch.zeros(-(-len(flat) // 63), 64)
    values[:, :63] = torch.nn.functional.pad(flat, (0, 63 * len(values) - len(flat))).view(-1, 63)
    values[:, 63] = 448.0
    values = values.to(DEVICE)
    got, want = (quantize_fp8(values, group_size=64, backend=backend) for backend in ("triton", "torch"))
    assert torch.equal(got[0].float().nan_to_num(1e9), want[0].float().nan_to_num(1e9))
    if DEVICE == "cuda":  # the signs of zeros too, which some interpreters lose
        assert torch.equal(got[0].view(torch.uint8)[:-1], want[0].view(torch.uint8)[:-1])
    assert torch.equal(got[1].nan_to_num(1e9), want[1].nan_to_num(1e9))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [300, 304], ids=["rows-off-16-bytes", "rows-on-16-bytes"])
def test_strided_rows_are_read_as_such(width, backend):
    wide = torch.full((4, width), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, :128] = torch.arange(4 * 128.0).view(4, 128)
    quantized, scales = quantize_fp8(wide[:, :128], backend=backend)
    alone = quantize_fp8(wide[:, :128].clone())
    assert torch.equal(quantized.float(), alone[0].float()) and torch.equal(scales, alone[1])


def test_round_up_pow2_at_powers_and_their_neighbours():
    powers = torch.tensor([2.0**-22, 0.5, 1.0, 64.0])
    assert torch.equal(round_up_pow2(powers), powers)
    assert torch.equal(round_up_pow2(torch.nextafter(powers, torch.tensor(1e9))), powers * 2)
    assert torch.equal(round_up_pow2(torch.nextafter(powers, torch.tensor(0.0))), powers)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        pytest.param(lambda: quantize_fp8(torch.ones(2, 100)), PlanError, "groups of 128", id="ragged-group"),
        pytest.param(lambda: quantize_fp8(torch.ones(2, 0)), PlanError, "0 values", id="no-values"),
        pytest.param(lambda: quantize_fp8(torch.ones(2, 128).double()), PlanError, "float64", id="float64"),
        pytest.param(lambda: quantize_fp8(torch.ones(128, 2).t()), PlanError, "strides", id="transposed"),
        pytest.param(lambda: quantize_fp8(torch.ones(2, 128), backend="cuda"), ConfigError, "triton", id="backend"),
        pytest.param(
            lambda: quantize_fp8(torch.ones(9, device=DEVICE)[1:].view(1, 8), group_size=8, backend="triton"),
            PlanError,
            "start at byte 4 of 16",
            id="not-aligned",
        ),
        pytest.param(
            lambda: dequantize_fp8(torch.ones(2, 4).to(torch.float8_e4m3fn), torch.ones(1, 1)),
            PlanError,
            "scales",
            id="scales-of-other-tokens",
        ),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()
