"""Tensors that the kernel tests make: int32 from anything, and outputs that hold garbage before a call."""

import numpy as np
import torch

GARBAGE = -99


def i32(values):
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def garbage(num_values):
    return torch.full((num_values,), GARBAGE, dtype=torch.int64)
