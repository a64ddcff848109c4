"""Tensors from a vector's lists, and the register of adapters."""

import torch

ADAPTERS = {}


def adapter(function):
    """Register the adapter of the vector file that has the function's name."""
    ADAPTERS[function.__name__] = function
    return function


def i32(values):
    return None if values is None else torch.tensor(values, dtype=torch.int32)


def i64(values):
    return None if values is None else torch.tensor(values, dtype=torch.int64)


def flags(values):
    return None if values is None else torch.tensor(values, dtype=torch.bool)


def rows(values):
    """A 2-D int32 tensor, also without rows."""
    return i32(values).reshape(len(values), len(values[0]) if values else 0)


def f32(values):
    """A float32 tensor from numbers and the words inf, -inf and nan."""

    def number(value):
        return [number(entry) for entry in value] if isinstance(value, list) else float(value)

    return torch.tensor(number(values), dtype=torch.float32)
