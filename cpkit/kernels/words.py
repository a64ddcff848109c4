"""Memory as kernels move it: words of 4 bytes, whatever their bits mean, read 16 bytes at a time where rows allow it.

A kernel reads 16 bytes at once only if its compiler knows that every row starts at a multiple of 16. Strides are plain
numbers at run time, so they are passed in units, and the unit is a constant of the kernel:

    row stride in words    2112    33    146
    unit                      4     1      2        stride = unit * what is passed
"""

import torch

from cpkit.errors import PlanError

WORD = 4
"""Bytes of a word."""
UNITS = (4, 2, 1)


def as_words(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as int32 words along the last dimension."""
    starts = [tensor.storage_offset(), *tensor.stride()[:-1]]
    if any(start * tensor.element_size() % WORD for start in starts) or tensor.data_ptr() % 16:
        raise PlanError(
            f"{name} has strides {tensor.stride()} and starts at byte {tensor.data_ptr() % 16} of 16: kernels take "
            f"rows of whole words of {WORD} bytes, the first at a multiple of 16; call .clone() first"
        )
    return tensor.view(torch.int32)


def stride_unit(words: torch.Tensor) -> int:
    """The largest unit of which the stride of the first dimension is a multiple."""
    return next(unit for unit in UNITS if words.stride(0) % unit == 0)
