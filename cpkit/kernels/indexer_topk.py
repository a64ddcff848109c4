"""Top-k of indexer logits that are never all in memory: which keys each query token keeps, in O(M k) bytes.

    indexer_topk(q, keys, weights, key_start, key_end, num_kept)      the same keys as topk(mqa_logits(...), ...)

Operands as mqa_logits takes them; result as topk gives it: [M, num_kept] int32, positions counted from key_start, -1
behind the last. The selection is that of the same backend's own logits, bit for bit. `scores`, [M, num_kept] fp32,
takes the logits of what is kept, -inf behind the last, for an exchange of candidates.

How it is done on Hopper, for 131,072 keys and num_kept = 2,048:

    every 48th key    -> logits -> a bound for each row that 76 of its samples pass: more than 2,048 keys do, fewer than
                                   6,016, but for a few rows in a million
    all keys          -> logits -> those that pass go to the row's list, the others nowhere
    lists             -> the 2,048 best; rows with too few or too many in their list are left open
    open rows         -> logits, where the lists were -> the 2,048 best

A key passes by (score, position), so equal scores do no harm; samples lie at hashed places of equal strata, so no order
of keys does. Which rows are open only the device knows: the host launches the last line often enough for all rows, and
launches that find none left end at once. Where the logits of all rows fit the workspace, where a row's list would be no
smaller than its logits, and elsewhere than on Hopper, logits are written for every row, some rows at a time.
"""

from typing import Any

import torch

from cpkit.errors import ConfigError
from cpkit.kernels.backends import BACKENDS, check_backend
from cpkit.kernels.candidates import local_candidates, token_order
from cpkit.kernels.checks import check_positive, check_tensor
from cpkit.kernels.gather_keys import pick_keys
from cpkit.kernels.gpu_kind import gpu_kind
from cpkit.kernels.key_shards import IndexKeys, WorkspaceKeys
from cpkit.kernels.mqa_logits import _mqa_logits_kernel, check_sizes, mqa_logits, mqa_logits_reference
from cpkit.kernels.mqa_operands import Operands
from cpkit.kernels.topk import TOPK, topk, topk_reference
from cpkit.kernels.topk_cuda import CAPACITY, launch

Found = tuple[torch.Tensor, torch.Tensor]
"""What is kept of each row, and its scores; these have no elements where they are not wanted."""

WORKSPACE_BYTES = 200_000_000
"""Most memory that lists or logits take at once; those of one row are taken whatever the limit."""
SAMPLE_STRIDE = 48
ROOM = 6016
"""Places in a row's list, while samples are at most SAMPLE_STRIDE keys apart: 4,096 lists take 197 MB."""


def indexer_topk_reference(
    q: torch.Tensor,
    keys: WorkspaceKeys,
    weights: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    num_kept: int,
) -> torch.Tensor:
    logits = mqa_logits_reference(q, keys, weights, key_start, key_end)
    return topk_reference(logits, key_start, key_end, num_kept)


def indexer_topk(
    q: torch.Tensor,
    keys: WorkspaceKeys,
    weights: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    num_kept: int,
    *,
    out: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    backend: str = "triton",
    workspace_bytes: int = WORKSPACE_BYTES,
) -> torch.Tensor:
    """Select on the operands' device. By triton it is not waited for, and a CUDA graph may capture a call. Raises
    ConfigError for what a backend is not built for, PlanError for operands that do not fit.
    """
    check_backend("indexer_topk", backend, BACKENDS, compiled=_mqa_logits_kernel, device=q.device)
    check_positive(num_kept=num_kept, workspace_bytes=workspace_bytes)
    if backend == "triton":
        check_sizes(q)
        if num_kept not in TOPK:
            raise ConfigError(f"num_kept={num_kept}: backend='triton' keeps {TOPK} keys; backend='torch' any number")
    operands = Operands(q, keys, weights, key_start, key_end)
    operands.check()
    if backend == "triton":
        operands.check_alignment()
    M, N = q.shape[0], operands.num_keys
    if out is None:
        out = torch.empty(M, num_kept, dtype=torch.int32, device=q.device)
    check_tensor("out", out, torch.int32, (M, num_kept), q.device)
    if scores is None:
        scores = torch.empty(0, dtype=torch.float32, device=q.device)  # none are wanted; a null pointer for kernels
    else:
        check_tensor("scores", scores, torch.float32, (M, num_kept), q.device)
    found = out, scores
    hopper = backend == "triton" and gpu_kind(q.device) == "hopper"
    if hopper and workspace_bytes < 4 * M * N and 8 * list_sizes(N)[1] < 4 * N:
        select_listed(operands, found, workspace_bytes)
    else:
        for part in split_rows(M, 4 * N, workspace_bytes):
            _select_written(operands, part, found, backend)
    return out


def list_sizes(num_keys: int) -> tuple[int, int]:
    """Distance of samples, at most 8,192 of which a block can sort, and places in a row's list.

    131,072 keys -> 48, 6,016;  1,048,576 -> 128, 8,192
    """
    stride = max(SAMPLE_STRIDE, -(-num_keys // CAPACITY))
    return stride, ROOM if stride == SAMPLE_STRIDE else CAPACITY


def logits_stride(num_keys: int) -> int:
    """Floats from row to row of logits in the memory of the lists: a multiple of 32."""
    return -(-num_keys // 32) * 32


def list_bytes(num_rows: int, num_keys: int, workspace_bytes: int) -> int:
    """Memory of the lists of some rows, and for the logits of at least 8 of those that they leave open, if they fit.

    In 200,000,000 bytes:

    4,096 rows of 131,072 keys -> 197,132,288, 376 rows of logits;  64 of 1,048,576 -> 33,554,432, 8 rows of logits
    """
    row_bytes = 4 * logits_stride(num_keys)
    fitting = max(workspace_bytes // row_bytes, 1)
    return max(8 * list_sizes(num_keys)[1] * num_rows, row_bytes * min(num_rows, fitting, 8))


def split_rows(num_rows: int, row_bytes: int, workspace_bytes: int) -> list[slice]:
    """Equal parts of the rows that fit the workspace, a multiple of 8 each but the last if 8 fit; a row at the least.

    20 rows of 100 bytes in 1,700 bytes -> 0 .. 16, 16 .. 20;  in 799 bytes -> 0 .. 7, 7 .. 14, 14 .. 20
    """
    fitting = max(workspace_bytes // max(row_bytes, 1), 1)
    unit = 8 if fitting >= 8 else 1
    num_parts = max(-(-num_rows // (fitting // unit * unit)), 1)
    rows = max(-(-num_rows // num_parts // unit) * unit, 1)
    return [slice(first, min(first + rows, num_rows)) for first in range(0, num_rows, rows)]


def _select_written(operands: Operands, part: slice, found: Found, backend: str) -> None:
    """Some rows by their logits."""
    rows, (out, scores) = operands.rows(part), found
    logits = mqa_logits(rows.q, rows.keys, rows.weights, rows.key_start, rows.key_end, backend=backend)
    kept = topk(logits, rows.key_start, rows.key_end, out.shape[1], backend=backend)
    out[part] = kept
    if len(scores):
        scores[part], _ = local_candidates(kept, logits, rows.key_start.clamp(min=0), token_order(0))


def select_listed(operands: Operands, found: Found, workspace_bytes: int) -> None:
    """Select all rows by lists of the keys that pass their bounds, and by logits those that these leave open."""
    out, scores = found
    M, N = operands.q.shape[0], operands.num_keys
    stride, room = list_sizes(N)
    parts = split_rows(M, 8 * room, workspace_bytes)
    positions = sample_positions(N, stride, out.device)
    samples = pick_keys(operands.keys, positions, backend="triton")
    memory = torch.empty(list_bytes(parts[0].stop, N, workspace_bytes), dtype=torch.uint8, device=out.device)
    open_rows = torch.zeros(len(parts), 1 + parts[0].stop, dtype=torch.int32, device=out.device)
    for part, left in zip(parts, open_rows, strict=True):
        rows = operands.rows(part)
        lists = memory[: 8 * room * len(rows.q)].view(torch.int64).view(-1, room)
        _list_and_select(rows, positions, samples, lists, (out[part], scores[part]), left)
        _close(rows, left, memory, (out[part], scores[part]))


def _list_and_select(
    rows: Operands,
    positions: torch.Tensor,
    samples: IndexKeys,
    lists: torch.Tensor,
    found: Found,
    open_rows: torch.Tensor,
) -> None:
    """Bounds, lists and selection of one part of the rows; samples: the keys at some positions.

    open_rows [1 + M]: how many are left open, and which.
    """
    from cpkit.kernels.mqa_logits_gluon import mqa_logits_hopper, mqa_survivors_hopper

    out, scores = found
    M, N, K, device, room = len(rows.q), rows.num_keys, out.shape[1], out.device, lists.shape[1]
    start = torch.searchsorted(positions, rows.key_start, out_int32=True)
    end = torch.searchsorted(positions, rows.key_end, out_int32=True)
    score = torch.empty(M, dtype=torch.float32, device=device)
    key = torch.empty(M, dtype=torch.int32, device=device)
    counts = torch.zeros(M, dtype=torch.int32, device=device)
    logits = lists.view(torch.float32)[:, : len(positions)]  # read before the lists are written
    mqa_logits_hopper(Operands(rows.q, samples, rows.weights, start, end), logits)
    ranges = (start, end, rows.key_start, rows.key_end)
    launch("topk_bounds", M, device, logits, positions, *ranges, score, key, N, logits.stride(0), K, room)
    mqa_survivors_hopper(rows, (score, key), lists, counts)
    bounds, sizes = (rows.key_start, score, key), (N, out.stride(0), scores.stride(0), K, room)
    launch("topk_survivors", M, device, lists, counts, *bounds, *found, open_rows, *sizes)


def _close(rows: Operands, open_rows: torch.Tensor, memory: torch.Tensor, found: Found) -> None:
    """Select by logits what is left open: in rounds, each of as many rows as the memory holds logits of."""
    from cpkit.kernels.mqa_logits_gluon import mqa_open_logits_hopper

    (out, scores), M, N = found, len(rows.q), rows.num_keys
    stride = logits_stride(N)
    logits = memory[: len(memory) // (4 * stride) * 4 * stride].view(torch.float32).view(-1, stride)[:, :N]
    for some in split_rows(M, 4 * stride, len(memory)):
        part, bounds = logits[: some.stop - some.start], (rows.key_start, rows.key_end)
        mqa_open_logits_hopper(rows, open_rows, some.start, part)
        sizes = (some.start, M, N, stride, out.stride(0), scores.stride(0), out.shape[1])
        launch("topk_open", len(part), out.device, part, open_rows, *bounds, *found, *sizes)


_places: dict[tuple[int, torch.device], torch.Tensor] = {}
"""By distance and device, for good: CUDA graphs read them, too. Up to 1,048,576 keys there are 81 distances."""


def sample_positions(num_keys: int, stride: int, device: torch.device) -> torch.Tensor:
    """[about keys / stride] int32, ascending: one key of each `stride`, at a hashed place; of the last few one or none.

    num_keys=10, stride=4: one of 0 .. 3, one of 4 .. 7, one of 8 9 or none
    """
    places = _places.get((stride, device))
    if places is None:
        i = torch.arange(CAPACITY, device=device)
        places = (i * stride + _hashed(i) % stride).int()
        if device.type != "cuda":
            _places[stride, device] = places
        elif not torch.cuda.is_current_stream_capturing():  # what a graph makes is its own
            torch.cuda.current_stream(device).synchronize()  # once, as other streams will read it
            _places[stride, device] = places
    whole, left = divmod(num_keys, stride)
    return places[: whole + (_hashed(whole) % stride < left)]


def _hashed(i: Any) -> Any:
    return (i * 0x9E3779B1 & 0xFFFFFFFF) >> 16
