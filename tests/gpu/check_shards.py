"""Keys scored where the DCP ranks' shards lie, on a GPU: the bits of the same keys put into token order.

python tests/gpu/check_shards.py [--small]     needs CUDA; exits 0, or raises at the first difference

Logits and the selection without logits, by the kernels that the chip has for it and by the portable ones. Shards lie in
memory full of NaN, and so is their padding; results lie in memory whose values are looked at afterwards. --small: few
rows and keys, for compute-sanitizer.
"""

import argparse
import itertools
import os
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from cpkit.kernels.deinterleave import deinterleave_idx_reference
from cpkit.kernels.gather_keys import gather_keys
from cpkit.kernels.indexer_topk import indexer_topk
from cpkit.kernels.key_shards import KeyShards, packed_bytes
from cpkit.kernels.mqa_logits import mqa_logits
from cpkit.kernels.mqa_operands import reads_shards

DEVICE = torch.device(os.environ.get("CHECK_DEVICE", "cuda"))
DIM, KEPT, UNSET = 128, 77.0, -7
FP8 = torch.float8_e4m3fn
EDGES = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 640]
"""Lengths of requests around whole tiles and turns."""


def shards_of(lens: list[int], dcp_size: int, interleave: int) -> tuple[KeyShards, list[int]]:
    """Random keys of requests of some lengths, padding NaN; and where each request starts in token order."""
    rounds, rest = zip(*(divmod(length, dcp_size * interleave) for length in lens), strict=True)
    held = [full * interleave + min(part, interleave) for full, part in zip(rounds, rest, strict=True)]
    local_start = torch.tensor([0, *itertools.accumulate(held)], dtype=torch.int32, device=DEVICE)
    keys = sum(held)
    values = torch.randn(dcp_size * keys, DIM, device=DEVICE).to(FP8)
    scales = torch.rand(dcp_size * keys, device=DEVICE) + 0.5
    starts = (local_start[:-1] * dcp_size).tolist()
    idx = deinterleave_idx_reference(local_start.long(), dcp_size * keys, dcp_size=dcp_size, interleave=interleave)
    padding = torch.ones(dcp_size * keys, dtype=torch.bool, device=DEVICE)
    for start, length in zip(starts, lens, strict=True):
        padding[idx[start : start + length]] = False
    values.view(torch.uint8)[padding] = 255
    scales[padding] = float("nan")
    size = packed_bytes(keys, DIM)
    memory = torch.full((256 + dcp_size * size + 16384,), 255, dtype=torch.uint8, device=DEVICE)
    packed = memory[256 : 256 + dcp_size * size].view(dcp_size, size)
    shards = KeyShards(packed, local_start, DIM, interleave)
    for rank, shard in enumerate(shards.shards()):
        part = slice(rank * keys, (rank + 1) * keys)
        shard.fill(values[part], scales[part])
    return shards, starts


def ranges(lens: list[int], starts: list[int], rows: int, *, in_order: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of rows of all requests: from the start or from inside, to a token of the request; some rows see none."""
    filled = [which for which, length in enumerate(lens) if length]
    found = [random.choice(filled) for _ in range(rows)]
    if in_order:
        found.sort()
    start, end = [], []
    for which in found:
        last = random.randint(1, lens[which])
        first = random.choice([0, 0, random.randint(0, last)])
        start.append(starts[which] + first)
        end.append(starts[which] + last)
    return tuple(torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in (start, end))  # type: ignore[return-value]


def check_case(lens: list[int], dcp_size: int, interleave: int, heads: int, rows: int, num_kept: int) -> int:
    """Rows compared; none where the kernels read such shards in token order alone."""
    shards, starts = shards_of(lens, dcp_size, interleave)
    if not reads_shards(shards):
        return 0
    where = (lens, dcp_size, interleave, heads)
    ordered, N = gather_keys(shards), shards.num_keys
    q = torch.randn(rows, heads, DIM, device=DEVICE).to(FP8)
    weights = torch.randn(rows, heads, device=DEVICE)
    for in_order in (True, False):
        start, end = ranges(lens, starts, rows, in_order=in_order)
        logits = [torch.full((rows + 2, N + 8), KEPT, device=DEVICE) for _ in range(2)]
        kept = [torch.full((rows + 2, num_kept), UNSET, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        for keys, written, selected in zip((shards, ordered), logits, kept, strict=True):
            mqa_logits(q, keys, weights, start, end, out=written[1:-1, 4:-4])
            room = 4 * rows * N // 3  # less than the logits, so that where there are lists, lists are used
            indexer_topk(q, keys, weights, start, end, num_kept, out=selected[1:-1], workspace_bytes=room)
        same((*where, "logits"), *(one.view(torch.int32) for one in logits))
        same((*where, "selection"), *kept)
        outside = logits[0][1:-1, 4:-4].clone()
        key = torch.arange(N, device=DEVICE)
        outside[(key >= start[:, None]) & (key < end[:, None])] = KEPT
        assert (outside == KEPT).all(), f"{where}: a logit outside its row's range"
        assert not logits[0].isnan().any(), f"{where}: padding reached a logit"
        for whole, inner, value in ((logits[0], logits[0][1:-1, 4:-4], KEPT), (kept[0], kept[0][1:-1], UNSET)):
            assert int((whole == value).sum()) - int((inner == value).sum()) == whole.numel() - inner.numel(), where
    return 2 * rows


def same(where: object, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got, want):
        differs = (got != want).nonzero()
        at = tuple(int(i) for i in differs[0])
        raise AssertionError(
            f"{where}: {len(differs)} of {got.numel()} differ, first at {at}: {got[at].item()} of shards, "
            f"{want[at].item()} of ordered keys"
        )


def check_all(turns: tuple[int, ...], *, small: bool) -> str:
    """Every number of ranks with every interleave; lengths at edges, and some beyond what is selected by its logits."""
    cases = rows_equal = 0
    for dcp_size, interleave, heads in itertools.product((1, 2, 3, 8), turns, (32, 64)):
        lens = random.sample(EDGES, 5) if small else [*random.sample(EDGES, 4), random.randint(13_000, 20_000)]
        lens.insert(random.randint(0, len(lens)), random.randint(100, 300 if small else 3000))
        done = check_case(lens, dcp_size, interleave, heads, 9 if small else 701, 512 if heads == 32 else 2048)
        cases, rows_equal = cases + bool(done), rows_equal + done
    assert cases, f"no shards with an interleave in {turns} are read as they lie: nothing was compared"
    return f"{cases} cases, {rows_equal:,} rows equal"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few rows and keys, for compute-sanitizer")
    args = parser.parse_args()
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was compared")
        return 2
    torch.manual_seed(0)
    random.seed(0)
    print(f"the chip's kernels: {check_all((64, 128, 192), small=args.small)}", flush=True)
    if DEVICE.type == "cuda":
        with ExitStack() as portable:
            for name in ("mqa_logits", "mqa_operands", "indexer_topk"):
                portable.enter_context(mock.patch(f"cpkit.kernels.{name}.gpu_kind", return_value="other"))
            print(f"portable kernels: {check_all((1, 5, 64), small=args.small)}", flush=True)
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
