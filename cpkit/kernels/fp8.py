"""Quantize groups of a token's values to fp8 e4m3, each group with a scale of its own, and back.

    scale = max(amax, 1e-4) / 448          448 is the largest e4m3 number; with pow2_scales rounded up to 2^n
    quantized = round(value / scale)       to the nearest e4m3, ties to even
    value = quantized * scale              undoes it up to rounding

A group of 4 values, for show:

    values            7.0   -3.0    0.5    0.0      amax 7, scale 7 / 448 = 1 / 64
    quantized       448.0 -192.0   32.0    0.0

What survives unchanged: an e4m3 number has 4 significant bits, and dividing by a power of two costs none. So a group
comes back bit for bit when its scale is a power of two and its values are whole multiples of one unit, at most 16 of
it. With pow2_scales that is every group of whole numbers from -16 to 16; without, such a group whose amax is 7 * 2^n,
because 7 / 448 = 2^-6. A group of zeros always survives.

values: [num_tokens, dim] fp32, bf16 or fp16, dim a multiple of group_size. quantized: [num_tokens, dim] float8_e4m3fn;
scales: [num_tokens, dim / group_size] fp32. A NaN or infinity makes its own group NaN and no other.
"""

import torch

from cpkit.errors import PlanError
from cpkit.kernels.backends import check_backend
from cpkit.kernels.checks import check_positive, check_tensor

E4M3_MAX = 448.0
LEAST_AMAX = 1e-4
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantize_fp8_reference(
    values: torch.Tensor, *, group_size: int, pow2_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = values.float().unflatten(1, (-1, group_size))
    amax = groups.abs().amax(2).clamp(min=LEAST_AMAX)
    # By a tensor: a GPU divides by a plain number as a product with its reciprocal, which rounds differently.
    scales = amax / torch.full_like(amax, E4M3_MAX)
    if pow2_scales:
        scales = round_up_pow2(scales)
    return (groups / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def quantize_fp8(
    values: torch.Tensor, *, group_size: int = 128, pow2_scales: bool = False, backend: str = "torch"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values and scales; pow2_scales: round scales up to powers of two (ue8m0)."""
    check_backend("quantize_fp8", backend)
    _check_groups("values", values, FLOATS, group_size)
    return quantize_fp8_reference(values, group_size=group_size, pow2_scales=pow2_scales)


def dequantize_fp8_reference(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = quantized.float().unflatten(1, (scales.shape[1], -1))
    values: torch.Tensor = (groups * scales[..., None]).flatten(1)
    return values


def dequantize_fp8(quantized: torch.Tensor, scales: torch.Tensor, *, backend: str = "torch") -> torch.Tensor:
    """[num_tokens, dim] fp32, the values that quantized numbers and their scales stand for."""
    check_backend("dequantize_fp8", backend)
    check_tensor("scales", scales, torch.float32, (quantized.shape[0], None), quantized.device)
    check_positive(groups=scales.shape[1])
    _check_groups("quantized", quantized, (torch.float8_e4m3fn,), quantized.shape[1] // scales.shape[1])
    return dequantize_fp8_reference(quantized, scales)


def round_up_pow2(scales: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below each scale (fp32, positive and normal), exact to the bit.

    The exponent grows by one unless all 23 bits behind it are zero.
    """
    bits = scales.view(torch.int32) + 0x7FFFFF
    return torch.where(scales.isfinite(), (bits >> 23 << 23).view(torch.float32), scales)


def _check_groups(name: str, values: torch.Tensor, dtypes: tuple[torch.dtype, ...], group_size: int) -> None:
    check_tensor(name, values, dtypes, (None, None), values.device)
    check_positive(group_size=group_size)
    if values.shape[1] == 0 or values.shape[1] % group_size:
        raise PlanError(
            f"{name} has {values.shape[1]} values a token in groups of {group_size}: groups must fill the token; "
            "pad it or choose another group_size"
        )
