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

Kernels round as the reference does, to the bit (which of the NaN codes a NaN gets aside): they divide, where a product
with the reciprocal would often differ in the last bit.
"""

import struct

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_tensor

E4M3_MAX = 448.0
LEAST_AMAX = 1e-4
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LEAST_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", LEAST_AMAX))[0])
GROUPS = 32
"""Groups of one program."""


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


@triton.jit
def _nearest_e4m3(x):
    """fp32 rounded to numbers that e4m3 holds, ties to even; below 2^-6 those are multiples of 2^-9."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = tl.where(x == x, (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000, 0x7FF00000)
    small = (tl.abs(x) + 16384.0) - 16384.0  # fp32 around 2^14 steps by 2^-9
    signed = tl.where(bits < 0, -small, small)
    return tl.where(tl.abs(x) < 0.015625, signed, rounded.to(tl.float32, bitcast=True))


# Triton's interpreter cuts where it should round to e4m3, a NaN's bits too: what it is given is rounded before.
ROUND_FIRST = tl.constexpr(not isinstance(_nearest_e4m3, triton.JITFunction))


@triton.jit
def quantize_groups(groups, POW2: tl.constexpr):
    """fp32 [n, group_size] -> float8e4nv [n, group_size] and fp32 scales [n].

    Sizes are compared as whole numbers, which order as the floats do and put NaN above all, so that it is not lost.
    """
    sizes = groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.maximum(tl.max(sizes, axis=1), LEAST_BITS).to(tl.float32, bitcast=True)
    scales = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    if POW2:
        bits = scales.to(tl.int32, bitcast=True)
        up = ((bits + 0x7FFFFF) >> 23) << 23
        scales = tl.where(bits < 0x7F800000, up, bits).to(tl.float32, bitcast=True)
    quotients = tl.div_rn(groups, tl.broadcast_to(scales[:, None], groups.shape))
    if ROUND_FIRST:
        quotients = _nearest_e4m3(quotients)
    return quotients.to(tl.float8e4nv), scales


@triton.jit(do_not_specialize=["num_groups", "groups_a_token", "stride"], do_not_specialize_on_alignment=["scales"])
def _quantize_kernel(
    values, quantized, scales, num_groups: tl.int64, groups_a_token: tl.int32, stride: tl.int64,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, POW2: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """GROUPS groups; stride: from token to token, in units of UNIT values."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, BLOCK_SIZE)[None, :]
    mask = (group < num_groups)[:, None] & (lane < SIZE)
    token = group // groups_a_token
    first = token * (stride * UNIT) + (group - token * groups_a_token) * SIZE
    found = tl.load(values + first[:, None] + lane, mask=mask, other=0.0).to(tl.float32)
    rounded, scale = quantize_groups(found, POW2)
    tl.store(quantized + group[:, None] * SIZE + lane, rounded, mask=mask)
    tl.store(scales + group, scale, mask=group < num_groups)


def quantize_fp8(
    values: torch.Tensor, *, group_size: int = 128, pow2_scales: bool = False, backend: str = "torch"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values and scales; pow2_scales: round scales up to powers of two (ue8m0)."""
    check_backend("quantize_fp8", backend, BACKENDS, compiled=_quantize_kernel, device=values.device)
    _check_groups("values", values, FLOATS, group_size)
    if backend == "torch":
        return quantize_fp8_reference(values, group_size=group_size, pow2_scales=pow2_scales)
    num_tokens, dim = values.shape
    quantized = torch.empty(num_tokens, dim, dtype=torch.float8_e4m3fn, device=values.device)
    scales = torch.empty(num_tokens, dim // group_size, dtype=torch.float32, device=values.device)
    if num_tokens:
        unit = value_unit(values, group_size)
        sizes = (scales.numel(), scales.shape[1], values.stride(0) // unit)
        _quantize_kernel[(triton.cdiv(scales.numel(), GROUPS),)](
            values, quantized, scales, *sizes, UNIT=unit, **group_sizes(group_size, pow2_scales)
        )
    return quantized, scales


def group_sizes(group_size: int, pow2_scales: bool) -> dict[str, int]:
    """Constants of the kernels that quantize, and their warps."""
    block = triton.next_power_of_2(group_size)
    return {"SIZE": group_size, "BLOCK_SIZE": block, "POW2": int(pow2_scales), "GROUPS": GROUPS, "num_warps": 4}


def value_unit(values: torch.Tensor, group_size: int) -> int:
    """Values that fill the 16 bytes a kernel reads at once, if rows start at such a boundary; else 1."""
    if values.data_ptr() % 16:
        raise PlanError(
            f"values start at byte {values.data_ptr() % 16} of 16: kernels read from a 16-byte boundary; "
            "call .clone() first"
        )
    unit = 16 // values.element_size()
    return unit if values.stride(0) % unit == 0 and group_size % unit == 0 else 1


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
