"""Sliding-window keys of every query token, as slots of a paged cache that every DCP rank holds whole.

window_size=3, block_size=2, block table 5 3, request of 4 tokens, the last two are queries:

    position   0  1  2  3            slots  10 11  6  7
    causal     token at 2            10 11  6              the token's own position counts
               token at 3            11  6  7
    draft      both tokens           10 11  6  7           the window before the block, then the whole block

`swa_indices` is causal, from `replay_start` of the request on where given (earlier window keys are gone);
`draft_swa_indices` shows every token of a draft block the same keys.

indices: [num_out, index_width] int32 (the attention kernels' contract: the caller checks that the cache has at most
2^31 rows), oldest key first, then -1; lens: [num_out] int32. Row n of the result is token token_offset + n. An invalid
token (its own slot is -1), or one of no request, sees nothing; a position behind the block table, or in a block below
0, has slot -1.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_rows, check_tensor
from cpkit.kernels.token_to_req import find_positions, positions_of_tokens
from cpkit.planner.slots import PAD

ROWS, COLUMNS, NUM_WARPS = 16, 128, 4
"""Tokens of one program, keys of each, and its warps."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowTokens:
    """The flat batch whose windows are asked for, on the device; block_size: keys of a cache block.

    query_start_loc: [num_rows + 1] int32; seq_lens: [num_rows] int32. token_to_req: [num_tokens] int32; is_valid:
    [num_tokens] bool. block_tables: [num_rows, width] int32. replay_start, row_stride: [num_rows] int32 or None; draft
    blocks read neither.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    token_to_req: torch.Tensor
    is_valid: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    replay_start: torch.Tensor | None = None
    row_stride: torch.Tensor | None = None


def swa_indices_reference(
    tokens: WindowTokens, num_out: int, index_width: int, *, window_size: int, token_offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    token, req, valid = _asked(tokens, token_offset, num_out)
    pos = find_positions(tokens.query_start_loc, tokens.seq_lens, token, req, tokens.row_stride)
    start = (pos - window_size + 1).clamp(min=0)
    if tokens.replay_start is not None:
        start = torch.maximum(start, tokens.replay_start[req].long())
    return _slots(tokens, start, pos + 1, req, valid, index_width)


def draft_swa_indices_reference(
    tokens: WindowTokens, num_out: int, index_width: int, *, window_size: int, token_offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _, req, valid = _asked(tokens, token_offset, num_out)
    stop, loc = tokens.seq_lens[req].long(), tokens.query_start_loc
    start = (stop - (loc[req + 1] - loc[req]) - window_size).clamp(min=0)
    return _slots(tokens, start, stop, req, valid, index_width)


def _asked(tokens: WindowTokens, token_offset: int, num_out: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens that rows are asked for, the request of each (row 0 where there is none), and whether it sees keys."""
    part, num_rows = slice(token_offset, token_offset + num_out), tokens.seq_lens.numel()
    token = torch.arange(part.start, part.stop, dtype=torch.int32, device=tokens.seq_lens.device)
    req = tokens.token_to_req[part].long()
    known = (req >= 0) & (req < num_rows)
    return token, torch.where(known, req, 0), tokens.is_valid[part] & known


def _slots(
    tokens: WindowTokens,
    start: torch.Tensor,
    stop: torch.Tensor,
    req: torch.Tensor,
    valid: torch.Tensor,
    index_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of positions start .. stop of each token, and their number, both int32."""
    num_keys = torch.where(valid, (stop - start).clamp(0, index_width), 0)
    column = torch.arange(index_width, device=start.device)
    position = start[:, None] + column
    entry = position // tokens.block_size
    last = tokens.block_tables.shape[1] - 1
    block = tokens.block_tables[req[:, None], entry.clamp(0, last)].long()
    shown = (column < num_keys[:, None]) & (entry <= last) & (block >= 0)
    slot = block * tokens.block_size + position % tokens.block_size
    return torch.where(shown, slot, PAD).int(), num_keys.int()


@triton.jit(
    do_not_specialize=[
        "query_start_loc", "seq_lens", "token_to_req", "is_valid", "block_tables", "replay_start", "row_stride",
        "indices", "lens", "num_replayed", "strided", "num_rows", "token_offset", "num_out", "window_size",
        "index_width", "table_width", "table_stride", "index_stride",
    ]
)  # fmt: skip
def _swa_indices_kernel(
    query_start_loc, seq_lens, token_to_req, is_valid, block_tables, replay_start, row_stride, indices, lens,
    num_replayed: tl.int32, strided: tl.int32, num_rows: tl.int32, token_offset: tl.int32, num_out: tl.int32,
    window_size: tl.int32, index_width: tl.int32, table_width: tl.int32, table_stride: tl.int64, index_stride: tl.int64,
    BLOCK_SIZE: tl.constexpr, DRAFT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens and COLUMNS of their keys. Positions are unsigned below 2^32: start and column are below 2^31."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = token_offset + n
    req = tl.load(token_to_req + token, mask=n < num_out, other=-1)
    valid = tl.load(is_valid + token, mask=n < num_out, other=0) != 0
    valid = valid & (req >= 0) & (req < num_rows)
    req = tl.where(valid, req, 0)
    if DRAFT:
        stop = tl.load(seq_lens + req).to(tl.int64)
        start = stop - (tl.load(query_start_loc + req + 1) - tl.load(query_start_loc + req)) - window_size
    else:
        stop = positions_of_tokens(query_start_loc, seq_lens, row_stride, token, req, strided) + 1
        start = stop - window_size
    kept = tl.load(replay_start + req, mask=req < num_replayed, other=0)
    start = tl.maximum(start, tl.maximum(kept, 0))
    num_keys = tl.where(valid, tl.minimum(tl.maximum(stop - start, 0), index_width), 0).to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(lens + n, num_keys, mask=n < num_out)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    position = start.to(tl.uint32)[:, None] + column.to(tl.uint32)[None, :]
    entry = position // BLOCK_SIZE
    shown = (column[None, :] < num_keys[:, None]) & (entry < table_width)
    table = block_tables + req.to(tl.int64) * table_stride
    block = tl.load(table[:, None] + entry, mask=shown, other=-1)
    slot = tl.where(block >= 0, block * BLOCK_SIZE + (position % BLOCK_SIZE).to(tl.int32), -1)
    written = (n < num_out)[:, None] & (column < index_width)[None, :]
    tl.store(indices + n.to(tl.int64)[:, None] * index_stride + column[None, :], slot, mask=written)


def swa_indices(
    tokens: WindowTokens,
    *,
    window_size: int,
    token_offset: int,
    indices: torch.Tensor,
    lens: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the causal windows of lens.numel() tokens from token_offset on."""
    _check("swa_indices", tokens, token_offset, indices, lens, backend)
    check_positive(window_size=window_size)
    if window_size > indices.shape[1]:
        raise PlanError(f"window_size={window_size} in index rows of {indices.shape[1]}: widen the rows")
    _write(tokens, window_size, token_offset, indices, lens, backend, draft=False)


def draft_swa_indices(
    tokens: WindowTokens,
    *,
    window_size: int,
    token_offset: int,
    indices: torch.Tensor,
    lens: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write what the tokens of draft blocks see; the caller checks that window and block fit an index row."""
    _check("draft_swa_indices", tokens, token_offset, indices, lens, backend)
    _write(tokens, window_size, token_offset, indices, lens, backend, draft=True)


def _write(
    tokens: WindowTokens,
    window_size: int,
    token_offset: int,
    indices: torch.Tensor,
    lens: torch.Tensor,
    backend: str,
    *,
    draft: bool,
) -> None:
    num_out, index_width = indices.shape
    if not num_out:
        return
    if backend == "torch":
        reference = draft_swa_indices_reference if draft else swa_indices_reference
        slots, num_keys = reference(tokens, num_out, index_width, window_size=window_size, token_offset=token_offset)
        indices.copy_(slots)
        lens.copy_(num_keys)
        return
    num_rows = tokens.seq_lens.numel()
    replayed = tokens.replay_start if not draft else None
    stride = tokens.row_stride if not draft else None
    grid = (triton.cdiv(num_out, ROWS), max(triton.cdiv(index_width, COLUMNS), 1))
    _swa_indices_kernel[grid](
        tokens.query_start_loc,
        tokens.seq_lens,
        tokens.token_to_req,
        tokens.is_valid,
        tokens.block_tables,
        tokens.seq_lens if replayed is None else replayed,  # not read: a None would make a second kernel
        tokens.seq_lens if stride is None else stride,
        indices,
        lens,
        0 if replayed is None else num_rows,
        int(stride is not None),
        num_rows,
        token_offset,
        num_out,
        window_size,
        index_width,
        tokens.block_tables.shape[1],
        tokens.block_tables.stride(0),
        indices.stride(0),
        BLOCK_SIZE=tokens.block_size,
        DRAFT=draft,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )


def _check(
    kernel: str, tokens: WindowTokens, token_offset: int, indices: torch.Tensor, lens: torch.Tensor, backend: str
) -> None:
    device, num_rows, num_tokens = tokens.seq_lens.device, tokens.seq_lens.numel(), tokens.token_to_req.numel()
    check_backend(kernel, backend, BACKENDS, compiled=_swa_indices_kernel, device=device)
    check_positive(block_size=tokens.block_size)
    check_rows(tokens.query_start_loc, tokens.seq_lens, tokens.row_stride)
    check_tensor("token_to_req", tokens.token_to_req, torch.int32, (None,), device)
    check_tensor("is_valid", tokens.is_valid, torch.bool, (num_tokens,), device)
    check_tensor("block_tables", tokens.block_tables, torch.int32, (num_rows, None), device)
    if tokens.replay_start is not None:
        check_tensor("replay_start", tokens.replay_start, torch.int32, (num_rows,), device)
    check_tensor("indices", indices, torch.int32, (lens.numel(), None), device)
    check_tensor("lens", lens, torch.int32, (None,), device)
    if not 0 <= token_offset <= num_tokens - lens.numel():
        raise PlanError(
            f"tokens {token_offset}..{token_offset + lens.numel()} of {num_tokens}: index rows are of tokens of the "
            "batch"
        )
    if lens.numel() and not tokens.block_tables.numel():
        raise PlanError(
            f"{lens.numel()} tokens and block_tables of shape {tuple(tokens.block_tables.shape)}: nothing to read"
        )
