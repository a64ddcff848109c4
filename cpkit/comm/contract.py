"""What a tensor must be to travel, checked on this rank before it meets any other; and sums in one fixed order."""

from collections.abc import Sequence

import torch

from cpkit.comm.call import Group
from cpkit.errors import PlanError

_INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PACKED = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)  # travel, but do not add up

REDUCIBLE = {str(dtype).removeprefix("torch."): dtype for dtype in _INTS + _FLOATS}
MOVABLE = REDUCIBLE | {str(dtype).removeprefix("torch."): dtype for dtype in _PACKED}
REDUCTIONS = ("sum", "min", "max")

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_MOST_WHAT = 64
_MOST_DIMS = 8


def check_what(what: str) -> None:
    """Raise PlanError unless `what` is a short name, as the plan's list spells its data."""
    if not (what.isascii() and what.isidentifier() and len(what) <= _MOST_WHAT):
        raise PlanError(
            f"what={what!r}: name the data in letters, digits and _, at most {_MOST_WHAT}, as the plan does"
        )


def check_moves(op: str, tensor: torch.Tensor, group: Group, device: torch.device) -> None:
    """Raise PlanError unless `tensor` can enter `op` over `group`: device, dtype, memory order, how dim 0 divides."""
    name = f"{op} over {group.name}"
    if not isinstance(tensor, torch.Tensor):
        raise PlanError(f"{name} takes a torch tensor, not {type(tensor).__name__}")
    allowed = REDUCIBLE if op in ("reduce_scatter", "all_reduce") else MOVABLE
    dtype = dtype_name(tensor.dtype)
    if dtype not in allowed:
        raise PlanError(f"{name} of {dtype}: it takes {', '.join(allowed)}")
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        raise PlanError(f"{name}: the tensor is on {tensor.device}, this rank on {device}; move it first")
    shape = list(tensor.shape)
    if not tensor.is_contiguous():
        raise PlanError(f"{name}: {dtype} {shape} has strides {tensor.stride()}; call .contiguous() first")
    if len(shape) > _MOST_DIMS or (not shape and op != "all_reduce"):
        raise PlanError(f"{name}: {dtype} {shape} has {len(shape)} dimensions; it takes 1 to {_MOST_DIMS}")
    if op in ("reduce_scatter", "all_to_all") and shape[0] % group.size:
        raise PlanError(
            f"{name}: dim 0 of {dtype} {shape} does not divide by the {group.size} ranks of the group: "
            "pad it, or split along another dimension"
        )


def check_reduction(reduction: str) -> None:
    """Raise PlanError unless the reduction has a meaning here."""
    if reduction not in REDUCTIONS:
        raise PlanError(f"reduction={reduction!r}: use one of {', '.join(REDUCTIONS)}")


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as the plan spells it: bfloat16, int64, ..."""
    return str(dtype).removeprefix("torch.")


def reduce_in_order(parts: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Parts of one shape and dtype -> a new tensor, combined in the order given: ((p0 + p1) + p2) + ...

    bfloat16 and float16 add up in float32 and are rounded once; whole numbers wrap as torch's do.
    """
    dtype = parts[0].dtype
    total = parts[0].to(_WIDE.get(dtype, dtype), copy=True)
    for part in parts[1:]:
        if reduction == "sum":
            total += part
        else:
            combine = torch.minimum if reduction == "min" else torch.maximum
            total = combine(total, part.to(total.dtype))
    return total.to(dtype)
