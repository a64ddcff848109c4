"""Caches as byte arrays, written one row at a time with plain offsets: what the paged kernels must agree with."""

import struct

import torch

GARBAGE = 0xFF
"""As fp32, bf16 and e4m3 alike: NaN."""


def page_cache(num_blocks, page_bytes, stride=None):
    """A cache of garbage, its pages `stride` bytes apart."""
    stride = stride or page_bytes
    memory = torch.full((num_blocks * stride,), GARBAGE, dtype=torch.uint8)
    return torch.as_strided(memory, (num_blocks, page_bytes), (stride, 1))


def put(cache, slot, block_size, main, side):
    """Write one row's bytes where the format says."""
    block, offset = divmod(slot, block_size)
    page = cache[block]
    for at, part in ((offset * len(main), main), (block_size * len(main) + offset * len(side), side)):
        page[at : at + len(part)] = torch.tensor(list(part), dtype=torch.uint8)


def fp32_bytes(value):
    return struct.pack("<f", value)


def bf16_bytes(value):
    """The upper half of the fp32 bytes: for values that bf16 holds exactly."""
    low, high = struct.unpack("<HH", struct.pack("<f", value))
    assert low == 0, value
    return struct.pack("<H", high)


def e4m3_byte(value):
    """One e4m3 code from the definition of the format, for values it holds exactly."""
    sign = 0x80 if value < 0 else 0
    size = abs(value)
    for code in range(0x7F):
        exponent, mantissa = divmod(code, 8)
        number = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        if number == size:
            return sign | code
    raise AssertionError(value)
