"""What every kernel asks of its arguments, refused at the border: a tensor read as another type reads other numbers.

Two int64 slots 7 -1, read as int32 by a kernel that expects int32, are 7 0 -1 -1: the second one a write to slot 0.
"""

import torch

from cpkit.errors import PlanError

INT32_MAX = 2**31 - 1
INTS = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device,
) -> None:
    """Raise PlanError unless a tensor has the dtype, shape (None: any size) and device, and elements side by side.

    Rows may lie apart (a view of a wider buffer); the elements of a row may not.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    fits = len(tensor.shape) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype not in dtypes or not fits or tensor.device != device:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise PlanError(
            f"{name} is {_spell(tensor.dtype)} [{', '.join(map(str, tensor.shape))}] on {tensor.device}: it must be "
            f"{' or '.join(map(_spell, dtypes))} [{wanted}] on {device}; convert or move it before the call"
        )
    if tensor.dim() and tensor.numel() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise PlanError(
            f"{name} has strides {tensor.stride()}: its last dimension must be contiguous; call .contiguous() first"
        )


def check_rows(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, row_stride: torch.Tensor | None) -> None:
    """The rows of a batch: query_start_loc [num_rows + 1], seq_lens and row_stride [num_rows], int32, on one device."""
    device, num_rows = query_start_loc.device, seq_lens.numel()
    check_tensor("query_start_loc", query_start_loc, torch.int32, (num_rows + 1,), device)
    check_tensor("seq_lens", seq_lens, torch.int32, (num_rows,), device)
    if row_stride is not None:
        check_tensor("row_stride", row_stride, torch.int32, (num_rows,), device)


def check_positive(**sizes: int) -> None:
    """Raise PlanError unless every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(f"{name}={size}: it must be at least 1")


def check_shard(dcp_size: int, dcp_rank: int, interleave: int) -> None:
    """Raise PlanError unless the DCP numbers name a shard."""
    check_positive(dcp_size=dcp_size, interleave=interleave)
    if not 0 <= dcp_rank < dcp_size:
        raise PlanError(f"dcp_rank={dcp_rank} is not in 0..{dcp_size - 1}")


def check_ranges(key_start: torch.Tensor, key_end: torch.Tensor) -> None:
    """Raise PlanError where a range of keys ends before it starts. Looks, so the host waits for a device's tensors."""
    backwards = (key_start > key_end).nonzero()
    if len(backwards):
        row = int(backwards[0, 0])
        raise PlanError(
            f"row {row}: key_start={int(key_start[row])} lies behind key_end={int(key_end[row])}: a token scores the "
            "keys key_start .. key_end - 1; give it an empty range, start = end, where it sees none"
        )


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
