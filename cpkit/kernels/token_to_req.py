"""Row of each flat token, and its position.  query_start_loc 0 3 3 5, seq_lens 7 0 2, num_mapped=5, 7 tokens:

    token       0 1 2 3 4 5 6
    row         0 0 0 2 2 0 0      padding tokens, from num_mapped on, name row 0
    position    4 5 6 0 1 - -

query_start_loc: [num_rows + 1] int32; rows without tokens are skipped. out: [num_tokens] int32, written in full. A
token behind the last boundary but before num_mapped (the device holds shorter queries than the host) names the last
row.
"""

import torch

from cpkit.errors import PlanError
from cpkit.kernels.checks import check_tensor


def token_to_req_reference(query_start_loc: torch.Tensor, num_tokens: int, *, num_mapped: int) -> torch.Tensor:
    token = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    return torch.where(token < num_mapped, find_rows(query_start_loc, token), 0).int()


def token_to_req(query_start_loc: torch.Tensor, *, num_mapped: int, out: torch.Tensor) -> None:
    """Write the row of every token into out."""
    device, num_rows = query_start_loc.device, query_start_loc.numel() - 1
    check_tensor("query_start_loc", query_start_loc, torch.int32, (None,), device)
    check_tensor("out", out, torch.int32, (None,), device)
    if num_rows < 1 and min(num_mapped, out.numel()) > 0:
        raise PlanError(f"{min(num_mapped, out.numel())} tokens and no rows: every token belongs to a row")
    if num_rows < 1:
        out.zero_()
    else:
        out.copy_(token_to_req_reference(query_start_loc, out.numel(), num_mapped=num_mapped))


def find_rows(query_start_loc: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Row of each token, int64; the last row for tokens past the last boundary. At least one row."""
    row = torch.searchsorted(query_start_loc[1:].contiguous(), token, right=True)
    return row.clamp(max=query_start_loc.numel() - 2)


def find_positions(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token: torch.Tensor,
    row: torch.Tensor,
    row_stride: torch.Tensor | None,
) -> torch.Tensor:
    """Position of each token in its request, int64, counted back from the row's last; below 0 where there is none.

    row_stride: [num_rows] int32, positions from one token of a row to the next; None: the tokens are neighbours.
    """
    behind = query_start_loc[row + 1].long() - 1 - token
    if row_stride is not None:
        behind = behind * row_stride[row]
    return seq_lens[row].long() - 1 - behind
