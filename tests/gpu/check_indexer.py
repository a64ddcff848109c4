"""The indexer's kernels on a GPU: logits, top-k, both at once and the exchange of candidates, against plain products
and sorts, to the bit.

python tests/gpu/check_indexer.py [--small] [--rows N]     needs CUDA; exits 0, or raises at the first difference

Scores are sums of small integers, which every order of adding gives exactly. Inputs lie in memory full of NaN, outputs
in memory whose values are looked at afterwards; what a row may not read would be its best key. --rows: most rows of a
case. --small: few rows and keys, for compute-sanitizer. On chips that have kernels of their own these are compared, and
the portable ones too.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from cpkit.kernels import indexer_topk as listed
from cpkit.kernels import mqa_logits as prefill
from cpkit.kernels import paged_mqa_logits as decode
from cpkit.kernels import topk as selection
from cpkit.kernels.candidates import KeyOrder, unpack_candidates
from cpkit.kernels.exchange_candidates import best_of_packed, join_packed, packed_candidates
from cpkit.kernels.gpu_kind import gpu_kind
from cpkit.kernels.indexer_topk import indexer_topk
from cpkit.kernels.key_shards import IndexKeys
from tests.gpu.hostile_scores import score_kinds

DEVICE = torch.device(os.environ.get("CHECK_DEVICE", "cuda"))
PAGE, KEPT, UNSET = 64, 77.0, -7
INF, NAN = float("inf"), float("nan")
FP8 = torch.float8_e4m3fn


class Canvas:
    """A result in the middle of a larger tensor of one value."""

    def __init__(self, rows: int, columns: int, value: float, dtype: torch.dtype = torch.float32) -> None:
        self.value = value
        self.whole = torch.full((rows + 2, columns + 8), value, dtype=dtype, device=DEVICE)
        self.inner = self.whole[1:-1, 4:-4]

    def check(self, where: object) -> None:
        """Raise unless all around it is as it was."""
        around = self.whole.clone()
        around[1:-1, 4:-4] = self.value
        assert (around == self.value).all(), f"{where}: written outside the result"


def surrounded(values: torch.Tensor) -> torch.Tensor:
    """The same between rows of bytes 0xff: NaN, or -1."""
    whole = torch.empty((len(values) + 128, *values.shape[1:]), dtype=values.dtype, device=DEVICE)
    whole.view(torch.uint8).fill_(255)
    inner = whole[64 : 64 + len(values)]
    inner.view(torch.uint8).copy_(values.contiguous().view(torch.uint8))
    return inner


def ints(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32, device=DEVICE)


def ranges(rows: int, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Key ranges: causal ones, short ones, and on a GPU some that are empty, backwards or beyond the keys."""
    start, end = ints(0, num_keys + 1, rows), ints(0, num_keys + 1, rows)
    start, end = torch.minimum(start, end), torch.maximum(start, end)
    start[::3] = 0
    end[1::4] = (start[1::4] + 9).clamp(max=num_keys)
    if DEVICE.type == "cuda":
        start[5::11], end[5::11] = num_keys // 2 + 1, num_keys // 2
        start[6::11], end[7::11] = -9, num_keys + 999
    return surrounded(start), surrounded(end)


def inside(start: torch.Tensor, end: torch.Tensor, num_keys: int) -> torch.Tensor:
    key = torch.arange(num_keys, device=DEVICE)
    return (key >= start[:, None]) & (key < end[:, None])


def same(where: object, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal numbers, or NaN on both sides."""
    differ = ((got != want) & ~(got.isnan() & want.isnan())).nonzero()
    if len(differ):
        at = tuple(differ[0].tolist())
        raise AssertionError(f"{where}: {len(differ)} differ, at {at} {got[at].item()}, not {want[at].item()}")


def portable(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same by the kernels for chips that have none of their own."""

    def run(*args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            for module in (prefill, decode, selection):
                stack.enter_context(mock.patch.object(module, "gpu_kind", return_value="other"))
            return call(*args, **options)

    return run


# ---- logits of a prefill -------------------------------------------------------------------------------------------


Data = tuple[torch.Tensor, IndexKeys, torch.Tensor]


def whole_operands(M: int, N: int, H: int) -> Data:
    """q, keys and weights that give whole numbers of quarters; some keys are NaN."""
    q, k = (surrounded(ints(-3, 4, *shape).float().to(FP8)) for shape in ((M, H, 128), (N, 128)))
    scale, weights = 2.0 ** ints(-3, 3, N), ints(-4, 5, M, H) / 4
    scale[N // 3 :: 97] = NAN
    return q, (k, surrounded(scale)), surrounded(weights)


def products(q: torch.Tensor, keys: IndexKeys, weights: torch.Tensor) -> torch.Tensor:
    """Logits of all rows and keys, summed in float64."""
    k, scale = keys
    wide, parts = k.double(), []
    for some, weight in zip(q.split(32), weights.split(32), strict=True):
        scores = (some.double() @ wide.T).relu()
        parts.append((scores * weight.double()[..., None]).sum(1) * scale.double())
    return torch.cat(parts).float()


def check_logits(most: int, small: bool) -> int:
    """Exact on whole numbers; on any numbers a row has the bits that it has without the rows beside it."""
    shapes = [(1, 1), (3, 63), (4, 64), (5, 129), (33, 700)]
    shapes += [] if small else [(1027, 1025), (300, 9000), (2048, 4097)]
    rows = 0
    for M, N in shapes:
        M = min(M, most)
        for H in (32, 64):
            data, bounds = whole_operands(M, N, H), ranges(M, N)
            want = torch.where(inside(*bounds, N), products(*data), KEPT)
            for name, call in (("own", prefill.mqa_logits), ("portable", portable(prefill.mqa_logits))):
                out = Canvas(M, N, KEPT)
                call(*data, *bounds, out=out.inner)
                same(("logits", name, M, N, H), out.inner, want)
                out.check(("logits", name, M, N, H))
                rows += M
            q, k, weights = torch.randn(M, H, 128), torch.randn(N, 128), torch.randn(M, H)
            q, k, weights = q.to(DEVICE).to(FP8), k.to(DEVICE).to(FP8), weights.to(DEVICE)
            scale = torch.ones(N, device=DEVICE)
            found = torch.where(inside(*bounds, N), prefill.mqa_logits(q, (k, scale), weights, *bounds), 0.0)
            want = torch.where(inside(*bounds, N), products(q, (k, scale), weights), 0.0)
            terms = products(q, (k, scale), weights.abs())  # without the signs that let a sum come out small
            assert (found - want).abs().max() <= 1e-3 * terms.max(), ("random logits", M, N, H)
            few = slice(M // 3, M // 3 + 7)
            part = [each[few].contiguous() for each in bounds]
            alone = prefill.mqa_logits(q[few].contiguous(), (k, scale), weights[few].contiguous(), *part)
            same(("rows alone", M, N, H), torch.where(inside(*part, N), alone, 0.0), found[few])
    return rows


# ---- logits of decodes ---------------------------------------------------------------------------------------------


def check_decode_logits(most: int, small: bool) -> int:
    """Pages in random order, all that no row reads NaN; blocks outside the cache read as zeros."""
    shapes = [(3, 1, 32, 65), (2, 2, 64, 130), (2, 3, 64, 72), (1, 5, 64, 70), (5, 4, 32, 300)]
    shapes += [] if small else [(700, 2, 64, 150)]  # a program scores more rows than it is told at once
    shapes += [] if small else [(64, 1, 64, 1000), (64, 1, 32, 5000), (40, 2, 64, 3000), (30, 4, 64, 2000)] * 4
    done = 0
    for case, (rows, tokens, H, longest) in enumerate(shapes):
        rows, width, gap = min(rows, most), -(-longest // PAGE), 128 * (case % 2)
        ends = surrounded(ints(0, longest + 1, rows, tokens))
        ends[0] = longest
        keys, scales = ints(-3, 4, rows, width * PAGE, 128), 2.0 ** ints(-3, 3, rows, width * PAGE)
        cache = torch.full((rows * width + 9, PAGE * 132 + gap), 255, dtype=torch.uint8, device=DEVICE)
        place = torch.randperm(len(cache), device=DEVICE)[: rows * width].view(rows, width)
        used = torch.arange(width, device=DEVICE) * PAGE < ends.amax(1, keepdim=True)
        pages = torch.cat([keys.float().to(FP8).view(torch.uint8).view(rows, width, -1),
                           scales.view(torch.uint8).view(rows, width, -1)], dim=2)  # fmt: skip
        cache[place[used], : PAGE * 132] = pages[used]
        wide = torch.full((rows, width + 3), 1 << 30, dtype=torch.int32, device=DEVICE)
        wide[:, :width][used] = place[used].int()
        for row, block in ((0, -1), (rows // 2, 1 << 30), (rows - 1, len(cache))):
            wide[row, width // 2] = block
            scales[row, width // 2 * PAGE : width // 2 * PAGE + PAGE] = 0
        q, weights = surrounded(ints(-3, 4, rows, tokens, H, 128).float().to(FP8)), ints(-4, 5, rows * tokens, H) / 4
        want = torch.cat([products(*row) for row in zip(
            q, zip(keys.float(), scales, strict=True), weights.view(rows, tokens, H), strict=True)])  # fmt: skip
        want = torch.where(torch.arange(width * PAGE, device=DEVICE) < ends.view(-1, 1), want, KEPT)[:, :longest]
        args = (q, cache, surrounded(weights), ends, wide[:, :width])
        for name, call in (("own", decode.paged_mqa_logits), ("portable", portable(decode.paged_mqa_logits))):
            out = Canvas(rows * tokens, longest, KEPT)
            call(*args, max_keys=longest, out=out.inner)
            same(("decode logits", name, rows, tokens, H, longest), out.inner, want)
            out.check(("decode logits", name))
            done += rows * tokens
    return done


# ---- top-k -----------------------------------------------------------------------------------------------------------


def hostile_logits(rows: int, num_keys: int, turn: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of every kind in turn, the first of another kind each turn, with ranges; infinite outside these."""
    canvas, kinds = Canvas(rows, num_keys, INF), score_kinds(num_keys, DEVICE)
    for first in range(len(kinds)):
        make = kinds[(first + rows * turn) % len(kinds)]
        canvas.inner[first :: len(kinds)] = make(len(range(first, rows, len(kinds))))
    start, end = ranges(rows, num_keys)
    canvas.inner.masked_fill_(~inside(start, end, num_keys), INF)
    return canvas.inner, start, end


def topk_shapes(small: bool) -> Iterator[tuple[int, int]]:
    """Each kernel of topk_cuda.py, on both sides of what it takes. Few rows come thrice: other kinds each time."""
    if small:
        yield from [(1, 1), (17, 513), (40, 2500)]
        if DEVICE.type == "cuda":
            yield from [(7, 8193), (4, 16_385), (2, 131_073), (20, 16_385), (40, 16_385)]
        return
    yield from [(4096, 700), (2048, 8191), (1024, 8192), (1024, 8193), (1024, 16_384), (1024, 16_385), (1024, 20_011)]
    yield from [(33, 16_385), (34, 16_385), (33, 131_072), (34, 131_072), (64, 131_072), (300, 131_073)]
    yield from [(1, 30_000), (16, 131_072), (12, 131_073), (13, 131_073), (12, 1 << 20), (3, (1 << 20) + 7)] * 3


def check_topk(most: int, small: bool) -> int:
    """Hostile rows, few and many, short and long, equal to full sorts."""
    rows = 0
    for turn, (M, N) in enumerate(topk_shapes(small)):
        logits, start, end = hostile_logits(min(M, most), N, turn)
        for k in selection.TOPK:
            want = selection.topk(logits, start, end, k, backend="torch").sort(dim=1).values
            for name, call in (("own", selection.topk), ("portable", portable(selection.topk))):
                out = Canvas(len(logits), k, UNSET, torch.int32)
                call(logits, start, end, k, out=out.inner)
                same(("topk", name, M, N, k), out.inner.sort(dim=1).values, want)
                out.check(("topk", name, M, N, k))
                rows += len(logits)
    return rows


# ---- both at once, and the exchange ----------------------------------------------------------------------------------


def fused_cases(M: int, N: int) -> Iterator[tuple[str, Data]]:
    """Operands whose rows mislead a sampled bound."""
    for H in (32, 64):
        yield f"whole numbers, {H} heads", whole_operands(M, N, H)
    q, k = (torch.randn(*shape, device=DEVICE).to(FP8) for shape in ((M, 64, 128), (N, 128)))
    weights, scale = torch.randn(M, 64, device=DEVICE), torch.rand(N, device=DEVICE) + 0.5
    key = torch.arange(N, device=DEVICE)
    yield "random", (q, (k, scale), weights)
    yield "all equal", (torch.zeros_like(q.view(torch.uint8)).view(FP8), (k, scale), weights)
    yield "one spike", (q, (k, torch.where(key == N // 3, 1e30, scale)), weights)
    yield "-inf tail", (q, (k, torch.where(key < N // 8, scale, INF)), -weights.abs())
    yield "NaN tail", (q, (k, torch.where(key < N // 20, scale, NAN)), weights)
    yield "rising", (q, (k, key.float()), weights)
    yield "equal rows", (q[:1].repeat(M, 1, 1), (k, scale), weights[:1].repeat(M, 1))


def fused_sizes(most: int, small: bool) -> tuple[int, int]:
    """Rows, and so many keys that lists are smaller than logits."""
    if DEVICE.type == "cpu":
        return 3, 600
    return (min(most, 20), 12_100) if small else (min(most, 333), 40_000)


def scores_of(logits: torch.Tensor, start: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Of what is kept, counted from start; -inf behind the last."""
    column = (start.clamp(min=0)[:, None] + kept).clamp(min=0)
    return logits.gather(1, column.long()).masked_fill(kept < 0, -INF)


def check_fused(most: int, small: bool) -> int:
    """The selection of written logits; the workspace is so small that rows are done in parts."""
    (M, N), rows = fused_sizes(most, small), 0
    for name, data in fused_cases(M, N):
        bounds = ranges(M, N)
        for k in selection.TOPK:
            logits = prefill.mqa_logits(*data, *bounds)
            want = selection.topk(logits, *bounds, k)
            out, scores = Canvas(M, k, UNSET, torch.int32), Canvas(M, k, KEPT)
            indexer_topk(*data, *bounds, k, out=out.inner, scores=scores.inner, workspace_bytes=4 * M * N // 3)
            same(("fused", name, k), out.inner, want)
            same(("fused scores", name, k), scores.inner, scores_of(logits, bounds[0], want))
            out.check(("fused", name, k))
            scores.check(("fused scores", name, k))
            rows += M
    return rows


def misled(M: int, N: int, rows: slice, value: float) -> Data:
    """Random, but in some rows the keys that are sampled score best (value above 0) or worst: a bound then lets through
    too few keys, or more than fit.
    """
    q, k, weights = torch.randn(M, 64, 128), torch.randn(N, 128), torch.randn(M, 64)
    q[..., 0], k[:, 0], weights[rows] = 0, 0, weights[rows].abs()
    q[rows, :, 0] = 1
    k[listed.sample_positions(N, listed.list_sizes(N)[0], torch.device("cpu")), 0] = value
    return q.to(DEVICE).to(FP8), (k.to(DEVICE).to(FP8), torch.ones(N, device=DEVICE)), weights.to(DEVICE)


def check_closing(most: int, small: bool) -> int:
    """Rows that lists leave open: none, one, some, all. A call does not wait for the device, and a graph that captured
    it closes whatever rows are open when it is replayed.
    """
    M, N = fused_sizes(most, small)
    q, (k, scale), weights = misled(M, N, slice(0), 0)
    end = torch.arange(N, N - M, -1, dtype=torch.int32, device=DEVICE)
    bounds, out = (torch.zeros_like(end), end), Canvas(M, 2048, UNSET, torch.int32)
    scores, sizes = Canvas(M, 2048, KEPT), {"workspace_bytes": 4 * M * N // 12}

    def run() -> None:
        indexer_topk(q, (k, scale), weights, *bounds, 2048, out=out.inner, scores=scores.inner, **sizes)

    run()
    replay: Callable[[], None] = run
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        run()
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    cases = {"none": slice(0), "the last": slice(M - 1, M), "every other": slice(0, M, 2), "all": slice(M)}
    for name, rows in cases.items():
        for value in (64.0, -64.0):
            new_q, (new_k, _), new_weights = misled(M, N, rows, value)
            for old, new in ((q, new_q), (k, new_k), (weights, new_weights)):
                old.copy_(new)
            logits = prefill.mqa_logits(q, (k, scale), weights, *bounds)
            want = selection.topk(logits, *bounds, 2048)
            for how in (run, replay):
                out.inner.fill_(UNSET), scores.inner.fill_(KEPT)
                how()
                same(("closing", name, value), out.inner, want)
                same(("closing scores", name, value), scores.inner, scores_of(logits, bounds[0], want))
                out.check(("closing", name, value)), scores.check(("closing scores", name, value))
            if gpu_kind(DEVICE) == "hopper":
                with mock.patch.object(listed, "_close", wraps=listed._close) as close:
                    run()
                num_open = sum(int(call.args[1][0]) for call in close.call_args_list)
                assert num_open == len(range(M)[rows]), ("left open", name, value, num_open)
    return len(cases) * 4 * M


def ordered(scores: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By position; padding first."""
    positions, order = positions.sort(dim=1)
    return scores.gather(1, order), positions


def check_exchange(most: int, small: bool) -> int:
    """Shards of hostile rows: packed, joined and chosen among as the torch forms do."""
    rows, N = (min(most, 20), 700) if small else (min(most, 2000), 2500)
    done = 0
    for k in selection.TOPK:
        for lists, interleave in ((1, 1), (2, 64), (3, 5), (8, 1)):
            sent = []
            for place in range(lists):
                logits, start, end = hostile_logits(rows, N)
                start = start.clamp(0, N)
                kept = selection.topk(logits, start, end, k)
                order = KeyOrder(lists, place, interleave, place * 3)
                both = [packed_candidates(kept, logits, start, order, backend=one) for one in ("torch", "triton")]
                assert torch.equal(*both), ("packed", k, lists, place)
                sent.append(both[1])
            gathered = surrounded(torch.cat(sent))
            calls: dict[str, Callable[[str], tuple[torch.Tensor, torch.Tensor]]] = {
                "best": lambda one, g=gathered, n=lists, k=k: best_of_packed(g, n, k, backend=one),
                "joined": lambda one, g=gathered, n=lists, k=k: unpack_candidates(join_packed(g, n, k, backend=one)),
            }
            for name, call in calls.items():
                for got, want in zip(ordered(*call("triton")), ordered(*call("torch")), strict=True):
                    same((name, k, lists), got, want)
            done += rows
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few rows and keys, for compute-sanitizer")
    parser.add_argument("--rows", type=int, default=4096, help="most rows of a case (4096)")
    args = parser.parse_args()
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was compared")
        return 2
    torch.manual_seed(0)
    for check in (check_topk, check_logits, check_decode_logits, check_fused, check_closing, check_exchange):
        print(f"{check.__name__}: {check(args.rows, args.small):,} rows equal", flush=True)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
