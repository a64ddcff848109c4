"""Tile schedule: where each worker (SM) starts, so that all workers of a decode kernel read equally many key tiles.

Keys are read in tiles of `tile` keys. Worker i does the tiles from schedule[i] up to schedule[i + 1], as (row, tile of
the row); the last entry ends the list. tile=4, 3 workers, rows of 5, 0, 9 and 1 keys:

    row         0    1    2       3
    tiles       0 1  -    0 1 2   0          6 tiles, 2 a worker
    schedule    (0,0)     (2,0)   (2,2)      (4,0)

With `req` (rows of one query token each, read together by request) only the first row of a request counts, with the
request's longest row.

num_keys: [num_rows] int32; req: [num_rows] int32, rows of a request adjacent, or None. out: [num_workers + 1, 2] int32.
"""

import torch
import triton
import triton.language as tl

from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.checks import check_positive, check_tensor

WORKERS, ROWS, NUM_WARPS = 16, 256, 4
"""Workers of one program, rows that it reads at once, and its warps."""


def tile_schedule_reference(
    num_keys: torch.Tensor, num_workers: int, *, tile: int, req: torch.Tensor | None = None
) -> torch.Tensor:
    tiles = (num_keys.long().clamp(min=0) + tile - 1) // tile
    if req is not None:
        is_first = torch.ones_like(req, dtype=torch.bool)
        is_first[1:] = req[1:] != req[:-1]
        group = is_first.long().cumsum(0) - 1
        longest = torch.zeros_like(tiles).scatter_reduce(0, group, tiles, "amax")
        tiles = torch.where(is_first, longest[group], 0)
    end = tiles.cumsum(0)
    worker = torch.arange(num_workers + 1, device=num_keys.device)
    share, longer = end[-1] // num_workers, end[-1] % num_workers
    first = worker * share + torch.minimum(worker, longer)
    row = torch.searchsorted(end, first, right=True)
    before = torch.cat([torch.zeros_like(end[:1]), end])[row]
    return torch.stack([row, first - before], dim=1).int()


@triton.jit
def _counted_tiles(num_keys, req, row, num_rows, tile, GROUPED: tl.constexpr):
    """Tiles that each row counts with, int64; a row behind the last counts none."""
    longest = tl.load(num_keys + row, mask=row < num_rows, other=0)
    if GROUPED:
        own = tl.load(req + row, mask=row < num_rows, other=0)
        is_first = (row == 0) | (own != tl.load(req + row - 1, mask=(row > 0) & (row < num_rows), other=0))
        ahead = row + 1
        together = is_first & (ahead < num_rows)
        together = together & (tl.load(req + ahead, mask=together, other=0) == own)
        while tl.max(together.to(tl.int32), axis=0) > 0:
            longest = tl.maximum(longest, tl.load(num_keys + ahead, mask=together, other=0))
            ahead += 1
            together = together & (ahead < num_rows)
            together = together & (tl.load(req + ahead, mask=together, other=0) == own)
        longest = tl.where(is_first, longest, 0)
    return (tl.maximum(longest, 0).to(tl.int64) + tile - 1) // tile


@triton.jit(do_not_specialize=["num_keys", "req", "out", "num_rows", "num_workers", "tile", "out_stride"])
def _tile_schedule_kernel(
    num_keys, req, out, num_rows: tl.int32, num_workers: tl.int32, tile: tl.int32, out_stride: tl.int64,
    GROUPED: tl.constexpr, WORKERS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program reads all rows twice: for the total, then for those that end before its workers start."""
    total = (num_rows * 0).to(tl.int64)
    for first_row in range(0, num_rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        total += tl.sum(_counted_tiles(num_keys, req, row, num_rows, tile, GROUPED), axis=0)

    worker = tl.program_id(0) * WORKERS + tl.arange(0, WORKERS)
    share = total // num_workers
    first = worker * share + tl.minimum(worker, total - share * num_workers)
    row_of_worker = tl.zeros_like(worker)
    before = first * 0
    done = total * 0
    for first_row in range(0, num_rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        tiles = _counted_tiles(num_keys, req, row, num_rows, tile, GROUPED)
        end = done + tl.cumsum(tiles, axis=0)
        is_past = (end[None, :] <= first[:, None]) & (row < num_rows)[None, :]
        row_of_worker += tl.sum(is_past.to(tl.int32), axis=1)
        before = tl.maximum(before, tl.max(tl.where(is_past, end[None, :], 0), axis=1))
        done += tl.sum(tiles, axis=0)
    tl.store(out + worker * out_stride, row_of_worker, mask=worker <= num_workers)
    tl.store(out + worker * out_stride + 1, (first - before).to(tl.int32), mask=worker <= num_workers)


def tile_schedule(
    num_keys: torch.Tensor,
    *,
    tile: int,
    req: torch.Tensor | None = None,
    out: torch.Tensor,
    backend: str = "torch",
) -> None:
    """Write the start of every worker into out."""
    check_backend("tile_schedule", backend, BACKENDS, compiled=_tile_schedule_kernel, device=out.device)
    num_workers, num_rows = out.shape[0] - 1, num_keys.numel()
    check_positive(tile=tile, num_workers=num_workers)
    check_tensor("num_keys", num_keys, torch.int32, (None,), out.device)
    if req is not None:
        check_tensor("req", req, torch.int32, (num_rows,), out.device)
    check_tensor("out", out, torch.int32, (None, 2), out.device)
    if not num_rows:
        out.zero_()
    elif backend == "torch":
        out.copy_(tile_schedule_reference(num_keys, num_workers, tile=tile, req=req))
    else:
        _tile_schedule_kernel[(triton.cdiv(num_workers + 1, WORKERS),)](
            num_keys,
            num_keys if req is None else req,  # not read: a None would make a second kernel
            out,
            num_rows,
            num_workers,
            tile,
            out.stride(0),
            GROUPED=req is not None,
            WORKERS=WORKERS,
            ROWS=ROWS,
            num_warps=NUM_WARPS,
        )
