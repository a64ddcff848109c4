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

from cpkit.kernels.checks import check_positive, check_tensor


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


def tile_schedule(num_keys: torch.Tensor, *, tile: int, req: torch.Tensor | None = None, out: torch.Tensor) -> None:
    """Write the start of every worker into out."""
    check_positive(tile=tile, num_workers=out.shape[0] - 1)
    check_tensor("num_keys", num_keys, torch.int32, (None,), out.device)
    if req is not None:
        check_tensor("req", req, torch.int32, (num_keys.numel(),), out.device)
    check_tensor("out", out, torch.int32, (None, 2), out.device)
    if num_keys.numel():
        out.copy_(tile_schedule_reference(num_keys, out.shape[0] - 1, tile=tile, req=req))
    else:
        out.zero_()
