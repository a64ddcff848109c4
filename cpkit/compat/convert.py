"""Between torch tensors and the planner's arrays, and between the planner's refusals and upstream's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cpkit.arrays import BoolArray, IntArray
from cpkit.errors import PlanError


class RefusedAssertionError(PlanError, AssertionError):
    """A refusal that upstream spells as a failed assertion."""


class RefusedIndexError(PlanError, IndexError):
    """A refusal that upstream spells as an index out of range."""


@contextmanager
def refuse_as(kind: type[PlanError]) -> Iterator[None]:
    """Give a PlanError raised inside the class that upstream's callers catch; the message stays."""
    try:
        yield
    except PlanError as error:
        raise kind(str(error)) from error


def ints(tensor: torch.Tensor) -> IntArray:
    """The tensor's values as int64 on the host."""
    return tensor.detach().cpu().numpy().astype(np.int64)


def flags(tensor: torch.Tensor) -> BoolArray:
    """The tensor's values as booleans on the host."""
    return tensor.detach().cpu().numpy().astype(np.bool_)


def int32(array: npt.NDArray[np.signedinteger[Any]], like: torch.Tensor | None = None) -> torch.Tensor:
    """An int32 tensor on the device of `like`; values beyond int32 wrap, as upstream's casts do."""
    return torch.from_numpy(array.astype(np.int32)).to(_device(like))


def int64(array: npt.NDArray[np.signedinteger[Any]], like: torch.Tensor | None = None) -> torch.Tensor:
    """An int64 tensor on the device of `like`."""
    return torch.from_numpy(np.array(array, np.int64)).to(_device(like))


def bools(array: BoolArray, like: torch.Tensor | None = None) -> torch.Tensor:
    """A bool tensor on the device of `like`."""
    return torch.from_numpy(np.array(array, np.bool_)).to(_device(like))


def _device(like: torch.Tensor | None) -> torch.device:
    return torch.device("cpu") if like is None else like.device
