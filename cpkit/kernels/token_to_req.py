"""Row of each flat token, and its position.  query_start_loc 0 3 3 5, seq_lens 7 0 2, num_mapped=5, 7 tokens:

    token       0 1 2 3 4 5 6
    row         0 0 0 2 2 0 0      padding tokens, from num_mapped on, name row 0
    position    4 5 6 0 1 - -

query_start_loc: [num_rows + 1] int32; rows without tokens are skipped. out: [num_tokens] int32, written in full. A
token behind the last boundary but before num_mapped (the device holds shorter queries than the host) names the last
row.

`rows_of_tokens` and `positions_of_tokens` are the same inside a kernel, for a block of tokens: work is spread over
tokens, and each program finds its tokens' rows by bisection, however they are spread over the rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_rows, check_tensor

BLOCK = 256
NUM_WARPS = 4
"""Tokens of one program and its warps: small, so that a step of a few thousand tokens fills the chip."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """Rows of a flat batch, on the device.

    query_start_loc: [num_rows + 1] int32; seq_lens: [num_rows] int32. row_stride: [num_rows] int32, positions from one
    token of a row to the next; None: 1.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    row_stride: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows, those without tokens included."""
        return self.seq_lens.numel()

    def check(self) -> None:
        """Raise PlanError unless the parts fit each other."""
        check_rows(self.query_start_loc, self.seq_lens, self.row_stride)


def token_to_req_reference(query_start_loc: torch.Tensor, num_tokens: int, *, num_mapped: int) -> torch.Tensor:
    token = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    return torch.where(token < num_mapped, find_rows(query_start_loc, token), 0).int()


@triton.jit
def rows_of_tokens(query_start_loc, token, num_rows):
    """Row of each of a block of tokens, int32: the last one that starts at or before it. At least one row.

    The steps are powers of two, from the largest below num_rows down; a step past the end stops at the last row, so
    that no lane, masked or not, reads outside query_start_loc.
    """
    step = 1
    while step * 2 < num_rows:
        step *= 2
    row = tl.zeros_like(token).to(tl.int32)
    while step > 0:
        ahead = tl.minimum(row + step, num_rows - 1)
        row = tl.where(tl.load(query_start_loc + ahead) <= token, ahead, row)
        step = step >> 1
    return row


@triton.jit
def positions_of_tokens(query_start_loc, seq_lens, row_stride, token, row, strided):
    """Position of each token in its request, int64, as find_positions counts it.

    row_stride is read if strided, which need not be a constant: a kernel for each kind of rows would double them.
    """
    behind = tl.load(query_start_loc + row + 1).to(tl.int64) - 1 - token
    if strided != 0:
        behind *= tl.load(row_stride + row)
    return tl.load(seq_lens + row).to(tl.int64) - 1 - behind


@triton.jit(do_not_specialize=["query_start_loc", "out", "num_rows", "num_mapped", "num_tokens"])
def _token_to_req_kernel(
    query_start_loc, out, num_rows: tl.int32, num_mapped: tl.int64, num_tokens: tl.int64, BLOCK: tl.constexpr
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = rows_of_tokens(query_start_loc, token, num_rows)
    tl.store(out + token, tl.where(token < num_mapped, row, 0), mask=token < num_tokens)


def token_to_req(query_start_loc: torch.Tensor, *, num_mapped: int, out: torch.Tensor, backend: str = "torch") -> None:
    """Write the row of every token into out."""
    check_backend("token_to_req", backend, BACKENDS, compiled=_token_to_req_kernel, device=out.device)
    device, num_rows, num_tokens = query_start_loc.device, query_start_loc.numel() - 1, out.numel()
    check_tensor("query_start_loc", query_start_loc, torch.int32, (None,), device)
    check_tensor("out", out, torch.int32, (None,), device)
    if num_rows < 1 and min(num_mapped, num_tokens) > 0:
        raise PlanError(f"{min(num_mapped, num_tokens)} tokens and no rows: every token belongs to a row")
    if num_rows < 1:
        out.zero_()
    elif backend == "torch":
        out.copy_(token_to_req_reference(query_start_loc, num_tokens, num_mapped=num_mapped))
    elif num_tokens:
        _token_to_req_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            query_start_loc, out, num_rows, num_mapped, num_tokens, BLOCK=BLOCK, num_warps=NUM_WARPS
        )


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
