"""Sliding-window keys of every query token, as slots of a paged cache that every DCP rank holds whole.

window_size=3, block_size=2, block table 5 3, request of 4 tokens, the last two are queries:

    position   0  1  2  3            slots  10 11  6  7
    causal     token at 2            10 11  6              the token's own position counts
               token at 3            11  6  7
    draft      both tokens           10 11  6  7           the window before the block, then the whole block

`swa_indices` is causal, from `replay_start` of the request on where given (earlier window keys are gone);
`draft_swa_indices` shows every token of a draft block the same keys.

query_start_loc: [num_rows + 1], seq_lens, replay_start, row_stride: [num_rows] int32. token_to_req: [num_tokens] int32
and is_valid: [num_tokens] bool, of the flat batch; row n of the result is token token_offset + n. block_tables:
[num_rows, width] int32. indices: [num_out, index_width] int32 (the attention kernels' contract: the caller checks that
the cache has at most 2^31 rows), oldest key first, then -1; lens: [num_out] int32. An invalid token (its own slot is
-1) sees nothing.
"""

import torch

from cpkit.errors import PlanError
from cpkit.kernels.checks import check_positive, check_rows, check_tensor
from cpkit.kernels.token_to_req import find_positions
from cpkit.planner.slots import PAD


def swa_indices_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    is_valid: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    window_size: int,
    token_offset: int,
    num_out: int,
    index_width: int,
    replay_start: torch.Tensor | None = None,
    row_stride: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    token = torch.arange(token_offset, token_offset + num_out, dtype=torch.int32, device=seq_lens.device)
    req = token_to_req[token_offset : token_offset + num_out].long()
    pos = find_positions(query_start_loc, seq_lens, token, req, row_stride)
    start = (pos - window_size + 1).clamp(min=0)
    if replay_start is not None:
        start = torch.maximum(start, replay_start[req].long())
    valid = is_valid[token_offset : token_offset + num_out]
    return _slots(start, pos + 1, req, valid, block_tables, block_size, index_width)


def swa_indices(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    is_valid: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    window_size: int,
    token_offset: int,
    replay_start: torch.Tensor | None = None,
    row_stride: torch.Tensor | None = None,
    indices: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Write the causal windows of lens.numel() tokens from token_offset on."""
    check_rows(query_start_loc, seq_lens, row_stride)
    _check(seq_lens, token_to_req, is_valid, block_tables, block_size, token_offset, indices, lens)
    check_positive(window_size=window_size)
    if window_size > indices.shape[1]:
        raise PlanError(f"window_size={window_size} in index rows of {indices.shape[1]}: widen the rows")
    if replay_start is not None:
        check_tensor("replay_start", replay_start, torch.int32, (seq_lens.numel(),), seq_lens.device)
    if not lens.numel():
        return
    slots, num_keys = swa_indices_reference(
        query_start_loc,
        seq_lens,
        token_to_req,
        is_valid,
        block_tables,
        block_size=block_size,
        window_size=window_size,
        token_offset=token_offset,
        num_out=lens.numel(),
        index_width=indices.shape[1],
        replay_start=replay_start,
        row_stride=row_stride,
    )
    indices.copy_(slots)
    lens.copy_(num_keys)


def draft_swa_indices_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    is_valid: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    window_size: int,
    token_offset: int,
    num_out: int,
    index_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    req = token_to_req[token_offset : token_offset + num_out].long()
    stop = seq_lens[req].long()
    start = (stop - (query_start_loc[req + 1] - query_start_loc[req]) - window_size).clamp(min=0)
    valid = is_valid[token_offset : token_offset + num_out]
    return _slots(start, stop, req, valid, block_tables, block_size, index_width)


def draft_swa_indices(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    is_valid: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    window_size: int,
    token_offset: int,
    indices: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Write what the tokens of draft blocks see; the caller checks that window and block fit an index row."""
    check_rows(query_start_loc, seq_lens, None)
    _check(seq_lens, token_to_req, is_valid, block_tables, block_size, token_offset, indices, lens)
    if not lens.numel():
        return
    slots, num_keys = draft_swa_indices_reference(
        query_start_loc,
        seq_lens,
        token_to_req,
        is_valid,
        block_tables,
        block_size=block_size,
        window_size=window_size,
        token_offset=token_offset,
        num_out=lens.numel(),
        index_width=indices.shape[1],
    )
    indices.copy_(slots)
    lens.copy_(num_keys)


def _slots(
    start: torch.Tensor,
    stop: torch.Tensor,
    req: torch.Tensor,
    valid: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    index_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of positions start .. stop of each token, and their number, both int32."""
    num_keys = torch.where(valid, (stop - start).clamp(0, index_width), 0)
    column = torch.arange(index_width, device=start.device)
    position = start[:, None] + column
    entry = position // block_size
    last = block_tables.shape[1] - 1
    block = block_tables[req[:, None], entry.clamp(0, last)].long()
    shown = (column < num_keys[:, None]) & (entry <= last)
    return torch.where(shown, block * block_size + position % block_size, PAD).int(), num_keys.int()


def _check(
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    is_valid: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    token_offset: int,
    indices: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    device = seq_lens.device
    check_positive(block_size=block_size)
    check_tensor("token_to_req", token_to_req, torch.int32, (None,), device)
    check_tensor("is_valid", is_valid, torch.bool, (token_to_req.numel(),), device)
    check_tensor("block_tables", block_tables, torch.int32, (seq_lens.numel(), None), device)
    check_tensor("indices", indices, torch.int32, (lens.numel(), None), device)
    check_tensor("lens", lens, torch.int32, (None,), device)
    if not 0 <= token_offset <= token_to_req.numel() - lens.numel():
        raise PlanError(
            f"tokens {token_offset}..{token_offset + lens.numel()} of {token_to_req.numel()}: index rows are of tokens "
            "of the batch"
        )
    if lens.numel() and not block_tables.numel():
        raise PlanError(f"{lens.numel()} tokens and block_tables of shape {tuple(block_tables.shape)}: nothing to read")
