"""Recent keys to gather for each prefill row: those its query tokens span, and what the first of them sees before them.

window_size=3:  5 query tokens behind a prefix of 1 need 6 keys, behind a prefix of 9 they need 7, and behind a prefix
of 9 of which the window cache still has position 8 (replay_start) they need 6.

query_start_loc: [num_rows + 1], seq_lens, replay_start, row_stride: [num_rows], out: [num_rows], int32. A row without
query tokens needs the end of its prefix.
"""

import torch

from cpkit.kernels.checks import check_positive, check_rows, check_tensor


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


def gather_lens(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window_size: int,
    replay_start: torch.Tensor | None = None,
    row_stride: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """Write the number of keys of each row into out."""
    check_rows(query_start_loc, seq_lens, row_stride)
    check_positive(window_size=window_size)
    if replay_start is not None:
        check_tensor("replay_start", replay_start, torch.int32, (seq_lens.numel(),), seq_lens.device)
    check_tensor("out", out, torch.int32, (seq_lens.numel(),), seq_lens.device)
    out.copy_(
        gather_lens_reference(
            query_start_loc, seq_lens, window_size=window_size, replay_start=replay_start, row_stride=row_stride
        )
    )
