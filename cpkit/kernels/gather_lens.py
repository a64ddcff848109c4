"""Recent keys to gather for each prefill row: those its query tokens span, and what the first of them sees before them.

window_size=3:  5 query tokens behind a prefix of 1 need 6 keys, behind a prefix of 9 they need 7, and behind a prefix
of 9 of which the window cache still has position 8 (replay_start) they need 6.

query_start_loc: [num_rows + 1], seq_lens, replay_start, row_stride: [num_rows], out: [num_rows], int32. A row without
query tokens needs the end of its prefix.
"""

import torch
import triton
import triton.language as tl

from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_rows, check_tensor

BLOCK = 128
NUM_WARPS = 4


def gather_lens_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window_size: int,
    replay_start: torch.Tensor | None = None,
    row_stride: torch.Tensor | None = None,
) -> torch.Tensor:
    spanned = query_start_loc[1:] - query_start_loc[:-1]
    if row_stride is not None:
        spanned = torch.where(spanned > 0, (spanned - 1) * row_stride + 1, 0)
    prefix = seq_lens - spanned
    if replay_start is not None:
        prefix = (prefix - replay_start).clamp(min=0)
    return spanned + prefix.clamp(max=window_size - 1)


@triton.jit(
    do_not_specialize=[
        "query_start_loc",
        "seq_lens",
        "replay_start",
        "row_stride",
        "out",
        "has_replay",
        "strided",
        "window_size",
        "num_rows",
    ],
)
def _gather_lens_kernel(
    query_start_loc,
    seq_lens,
    replay_start,
    row_stride,
    out,
    has_replay: tl.int32,
    strided: tl.int32,
    window_size: tl.int64,
    num_rows: tl.int64,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row < num_rows
    start = tl.load(query_start_loc + row, mask=here, other=0).to(tl.int64)
    spanned = tl.load(query_start_loc + 1 + row, mask=here, other=0).to(tl.int64) - start
    if strided != 0:
        stride = tl.load(row_stride + row, mask=here, other=1)
        spanned = tl.where(spanned > 0, (spanned - 1) * stride + 1, 0)
    prefix = tl.load(seq_lens + row, mask=here, other=0) - spanned
    if has_replay != 0:
        prefix = tl.maximum(prefix - tl.load(replay_start + row, mask=here, other=0), 0)
    tl.store(out + row, (spanned + tl.minimum(prefix, window_size - 1)).to(tl.int32), mask=here)


def gather_lens(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window_size: int,
    replay_start: torch.Tensor | None = None,
    row_stride: torch.Tensor | None = None,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the number of keys of each row into out."""
    check_backend("gather_lens", backend, BACKENDS, compiled=_gather_lens_kernel, device=out.device)
    check_rows(query_start_loc, seq_lens, row_stride)
    check_positive(window_size=window_size)
    if replay_start is not None:
        check_tensor("replay_start", replay_start, torch.int32, (seq_lens.numel(),), seq_lens.device)
    check_tensor("out", out, torch.int32, (seq_lens.numel(),), seq_lens.device)
    if backend == "torch":
        out.copy_(
            gather_lens_reference(
                query_start_loc, seq_lens, window_size=window_size, replay_start=replay_start, row_stride=row_stride
            )
        )
    elif out.numel():
        # a pointer that the kernel does not read stands where an argument is None: None would be a kernel of its own
        _gather_lens_kernel[(triton.cdiv(out.numel(), BLOCK),)](
            query_start_loc,
            seq_lens,
            seq_lens if replay_start is None else replay_start,
            seq_lens if row_stride is None else row_stride,
            out,
            int(replay_start is not None),
            int(row_stride is not None),
            window_size,
            out.numel(),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
