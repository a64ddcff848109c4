"""The attention caches: rows of fp8 values with their scales, and the rope part in bf16.

V3.2 and GLM, 656 bytes a row, rows side by side in the page:

    byte of the row    0           512          528          656
                       512 e4m3    4 fp32       64 bf16          576 values, one scale per 128

V4, 584 bytes a row, the scales of a block behind the data of all its rows:

    byte of the page   0                         block_size * 576             block_size * 584
                       448 e4m3, 64 bf16 | ...   7 ue8m0, 1 pad | ...         512 values, one scale per 64

ue8m0 is the 8 exponent bits of an fp32 power of two: byte b stands for 2^(b - 127). The pad byte is 0.

pack_*: values -> rows as they travel between ranks and as the cache takes them; unpack_* undoes it, up to fp8 rounding.
latent: [num_keys, 576 or 512] bf16, fp16 or fp32, rope last; rows: [num_keys, 656 or 584] uint8; unpacked: fp32.
cache: [num_blocks, page_bytes] uint8, page_bytes at least block_size * row bytes. slots: [num_keys] int64; -1, or
outside the cache: nothing is written, and zeros are read.
"""

import torch

from cpkit.kernels.checks import check_tensor
from cpkit.kernels.fp8 import FLOATS, dequantize_fp8, quantize_fp8
from cpkit.kernels.paged_rows import bytes_as, read_rows, write_rows

ROPE_DIM = 64
ROPE_BYTES = 2 * ROPE_DIM

V32_FP8, V32_GROUP = 512, 128
V32_DIM = V32_FP8 + ROPE_DIM
V32_SCALE_BYTES = 4 * V32_FP8 // V32_GROUP
V32_BYTES = V32_FP8 + V32_SCALE_BYTES + ROPE_BYTES

V4_FP8, V4_GROUP = 448, 64
V4_DIM = V4_FP8 + ROPE_DIM
V4_MAIN_BYTES = V4_FP8 + ROPE_BYTES
V4_SIDE_BYTES = V4_FP8 // V4_GROUP + 1
V4_BYTES = V4_MAIN_BYTES + V4_SIDE_BYTES


def pack_v32_rows(latent: torch.Tensor, *, pow2_scales: bool = False) -> torch.Tensor:
    """[num_keys, 576] -> [num_keys, 656] uint8; pow2_scales: round the scales up to powers of two."""
    check_tensor("latent", latent, FLOATS, (None, V32_DIM), latent.device)
    values, scales = quantize_fp8(latent[:, :V32_FP8], group_size=V32_GROUP, pow2_scales=pow2_scales)
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8), _rope_bytes(latent)], dim=1)


def unpack_v32_rows(rows: torch.Tensor) -> torch.Tensor:
    """[num_keys, 656] uint8 -> [num_keys, 576] fp32."""
    check_tensor("rows", rows, torch.uint8, (None, V32_BYTES), rows.device)
    values, scales, rope = rows.split([V32_FP8, V32_SCALE_BYTES, ROPE_BYTES], dim=1)
    latent = dequantize_fp8(values.view(torch.float8_e4m3fn), bytes_as(scales, torch.float32))
    return torch.cat([latent, bytes_as(rope, torch.bfloat16).float()], dim=1)


def insert_v32_rows(
    cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, block_size: int, backend: str = "torch"
) -> None:
    """Write packed rows to their slots."""
    check_tensor("rows", rows, torch.uint8, (slots.shape[0], V32_BYTES), cache.device)
    write_rows(cache, rows, slots, block_size=block_size, side_bytes=0, backend=backend)


def gather_v32_rows(
    cache: torch.Tensor, slots: torch.Tensor, *, block_size: int, backend: str = "torch"
) -> torch.Tensor:
    """[num_keys, 656] uint8, packed rows in the slots."""
    return read_rows(cache, slots, block_size=block_size, main_bytes=V32_BYTES, side_bytes=0, backend=backend)


def pack_v4_rows(latent: torch.Tensor) -> torch.Tensor:
    """[num_keys, 512] -> [num_keys, 584] uint8."""
    check_tensor("latent", latent, FLOATS, (None, V4_DIM), latent.device)
    values, scales = quantize_fp8(latent[:, :V4_FP8], group_size=V4_GROUP, pow2_scales=True)
    side = values.new_zeros(len(latent), V4_SIDE_BYTES, dtype=torch.uint8)
    side[:, :-1] = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return torch.cat([values.view(torch.uint8), _rope_bytes(latent), side], dim=1)


def unpack_v4_rows(rows: torch.Tensor) -> torch.Tensor:
    """[num_keys, 584] uint8 -> [num_keys, 512] fp32."""
    check_tensor("rows", rows, torch.uint8, (None, V4_BYTES), rows.device)
    values, rope, side = rows.split([V4_FP8, ROPE_BYTES, V4_SIDE_BYTES], dim=1)
    scales = (side[:, :-1].to(torch.int32) << 23).view(torch.float32)
    latent = dequantize_fp8(values.view(torch.float8_e4m3fn), scales)
    return torch.cat([latent, bytes_as(rope, torch.bfloat16).float()], dim=1)


def insert_v4_rows(
    cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, block_size: int, backend: str = "torch"
) -> None:
    """Write packed rows to their slots: data and scales to their own parts of the page."""
    check_tensor("rows", rows, torch.uint8, (slots.shape[0], V4_BYTES), cache.device)
    write_rows(cache, rows, slots, block_size=block_size, side_bytes=V4_SIDE_BYTES, backend=backend)


def gather_v4_rows(
    cache: torch.Tensor, slots: torch.Tensor, *, block_size: int, backend: str = "torch"
) -> torch.Tensor:
    """[num_keys, 584] uint8, packed rows in the slots."""
    return read_rows(
        cache, slots, block_size=block_size, main_bytes=V4_MAIN_BYTES, side_bytes=V4_SIDE_BYTES, backend=backend
    )


def _rope_bytes(latent: torch.Tensor) -> torch.Tensor:
    return bytes_as(latent[:, -ROPE_DIM:].to(torch.bfloat16), torch.uint8)
