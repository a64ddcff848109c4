"""Time the indexer kernels on a Hopper GPU beside the published ones, and write benchmarks/results/indexer.json.

    PYTHONPATH=. python benchmarks/indexer.py [--peers DIR]

DIR holds the peers: `deep_gemm/` (importable) and `vllm_c.so` (vllm's custom operations); without it cpkit runs alone.
Times are medians of single CUDA-graph replays, peer and cpkit in turn in the same process; where the host takes part
(`calls`), of single calls between two events. The ceilings are measured in the same run: a kernel that negates (bytes
read and written) and an fp8 matrix product of 8,192 cubed.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Work, copy_gb_per_s, time_together, write_result
from cpkit.kernels.gather_keys import gather_keys, keys_out
from cpkit.kernels.indexer_topk import indexer_topk
from cpkit.kernels.key_shards import IndexKeys, KeyShards, packed_bytes
from cpkit.kernels.mqa_logits import mqa_logits, mqa_logits_reference
from cpkit.kernels.topk import topk, topk_reference

LOGITS_SHAPES = [  # query rows, keys, index heads; the rows are the last tokens of one request
    (4096, 131072, 64), (2048, 16384, 64), (8192, 8192, 64), (4096, 131072, 32), (8192, 8192, 32),
]  # fmt: skip
TOPK_SHAPES = [
    (4096, 131072, 2048), (4096, 131072, 1024), (4096, 131072, 512), (512, 1 << 20, 2048), (4096, 32768, 2048),
    (4096, 16384, 2048), (8192, 8192, 2048), (4096, 8192, 512),
]  # fmt: skip
DECODE_SHAPES = [(64, 131072), (34, 131072), (33, 131072), (16, 131072), (16, 1 << 20), (8, 1 << 20)]
LISTED_SHAPES = [(4096, 131072, 64), (4096, 131072, 32)]
SHARDS_SHAPES = [  # the first three as above, DCP ranks, interleave
    (4096, 131072, 64, 2, 64), (4096, 131072, 64, 8, 64), (4096, 131072, 64, 8, 1024), (4096, 131072, 32, 8, 64),
]  # fmt: skip
INF = float("inf")
Data = tuple[torch.Tensor, IndexKeys, torch.Tensor]
"""Queries, keys and weights."""


def causal(M: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    end = torch.arange(N - M + 1, N + 1, dtype=torch.int32, device="cuda")
    return torch.zeros_like(end), end


def ceilings() -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    ms = time_together({"product": product})["product"]
    return {"copy_gb_per_s": copy_gb_per_s(), "fp8_tflops": 2 * 8192**3 / ms / 1e9}


def operands(M: int, N: int, H: int) -> Data:
    q = torch.randn(M, H, 128, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(N, 128, device="cuda").to(torch.float8_e4m3fn)
    return q, (k, torch.rand(N, device="cuda") + 0.5), torch.randn(M, H, device="cuda")


def peer_logits(peer: Any, data: Data, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    q, keys, weights = data
    return peer.fp8_fp4_mqa_logits((q, None), keys, weights, start, end, len(keys[1]))


def bench_logits(M: int, N: int, H: int, peer: Any, ceiling: dict[str, float]) -> dict[str, Any]:
    data, (start, end), out = operands(M, N, H), causal(M, N), torch.empty(M, N, device="cuda")
    works: dict[str, Work] = {"cpkit": lambda: mqa_logits(*data, start, end, out=out)}
    if peer:
        works["peer"] = lambda: peer_logits(peer, data, start, end)
    ms = time_together(works)
    some = torch.arange(0, M, M // 8, device="cuda")
    q, keys, weights = data
    want = mqa_logits_reference(q[some], keys, weights[some], start[some], end[some])
    error = ((out[some] - want).nan_to_num().norm() / want.nan_to_num().norm()).item()
    flops = 2 * 128 * H * int((end - start).sum())
    row = {"work": "mqa_logits", "M": M, "N": N, "H": H, "ms": ms, "tflops": flops / ms["cpkit"] / 1e9}
    return {**row, "floor_ms": flops / ceiling["fp8_tflops"] / 1e9, "relative_error": error}


def bench_skewed(M: int, N: int, H: int) -> dict[str, Any]:
    """A head-tail batch: half of the rows near the start of a request, half at its end. Rate beside the end's alone."""
    data, out = operands(M, N, H), torch.empty(M, N, device="cuda")
    start, tail = causal(M, N)
    skewed = torch.cat([tail[: M // 2] - (N - M), tail[M // 2 :]])
    ms = time_together(
        {
            "skewed": lambda: mqa_logits(*data, start, skewed, out=out),
            "tail": lambda: mqa_logits(*data, start, tail, out=out),
        }
    )
    rates = {name: 256 * H * int(end.sum()) / ms[name] / 1e9 for name, end in (("skewed", skewed), ("tail", tail))}
    kept = rates["skewed"] / rates["tail"]
    return {"work": "mqa_logits head-tail", "M": M, "N": N, "H": H, "ms": ms, "tflops": rates, "rate_kept": kept}


def equals_full_sort(
    logits: torch.Tensor, start: torch.Tensor, end: torch.Tensor, out: torch.Tensor, num_rows: int = 64
) -> bool:
    some = torch.arange(0, len(logits), max(len(logits) // num_rows, 1), device="cuda")
    want = topk_reference(logits[some], start[some], end[some], out.shape[1]).sort(dim=1).values
    return torch.equal(out[some].sort(dim=1).values, want)


def bench_topk(M: int, N: int, k: int, peer: bool, ceiling: dict[str, float]) -> dict[str, Any]:
    logits, (start, end) = torch.randn(M, N, device="cuda"), causal(M, N)
    out, peer_out = (torch.empty(M, k, dtype=torch.int32, device="cuda") for _ in range(2))
    works: dict[str, Work] = {"cpkit": lambda: topk(logits, start, end, k, out=out)}
    if peer:
        call = torch.ops._C.top_k_per_row_prefill
        works["peer"] = lambda: call(logits, start, end, peer_out, M, logits.stride(0), 1, k)
    ms = time_together(works)
    floor = 4 * int((end - start).sum()) / ceiling["copy_gb_per_s"] / 1e6
    exact = equals_full_sort(logits, start, end, out)
    return {"work": "topk", "M": M, "N": N, "k": k, "ms": ms, "floor_ms": floor, "equals_full_sort": exact}


def bench_decode(B: int, N: int, peer: bool, ceiling: dict[str, float]) -> dict[str, Any]:
    """One query token of each of B requests; vllm's cooperative kernel, and its persistent one for comparison."""
    k, logits = 2048, torch.randn(B, N, device="cuda")
    start = torch.zeros(B, dtype=torch.int32, device="cuda")
    end = torch.full_like(start, N)
    out, peer_out = (torch.empty(B, k, dtype=torch.int32, device="cuda") for _ in range(2))
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    works: dict[str, Work] = {"cpkit": lambda: topk(logits, start, end, k, out=out)}
    if peer:
        works["peer"] = lambda: torch.ops._C.cooperative_topk(logits, end, peer_out, workspace, k, N)
        works["peer_persistent"] = lambda: torch.ops._C.persistent_topk(logits, end, peer_out, workspace, k, N)
    ms = time_together(works)
    exact = equals_full_sort(logits, start, end, out, num_rows=8)
    floor = 4 * B * N / ceiling["copy_gb_per_s"] / 1e6
    return {"work": "topk decode", "M": B, "N": N, "k": k, "ms": ms, "floor_ms": floor, "equals_full_sort": exact}


def hostile_rows(M: int, N: int) -> dict[str, torch.Tensor]:
    """Rows that mislead a sampled threshold; one is repeated, so that all rows go wrong together."""
    pos, noise = torch.arange(N, device="cuda").float(), torch.randn(N, device="cuda")
    rows = {
        "random": noise,
        "all equal": torch.zeros_like(noise),
        "rising": pos,
        "falling": -pos,
        "one spike": torch.where(pos == 777, 1e30, noise),
        "-inf tail": torch.where(pos < N // 4, noise, -INF),
        "-inf but 100": torch.where(pos < 100, noise, -INF),
        "best in one run": torch.where((pos > N / 2) & (pos < N / 2 + 3000), noise + 9, noise),
        "best in runs of 64": torch.where(pos // 64 % 60 == 7, noise + 9, noise),
    }
    return {name: row.expand(M, N) for name, row in rows.items()}


def bench_hostile(M: int, N: int, k: int) -> dict[str, Any]:
    (start, end), out, logits = causal(M, N), torch.empty(M, k, dtype=torch.int32, device="cuda"), None
    ms, exact = {}, True
    for name, row in hostile_rows(M, N).items():
        logits = row.contiguous()
        ms |= time_together({name: lambda logits=logits: topk(logits, start, end, k, out=out)})
        exact &= equals_full_sort(logits, start, end, out, num_rows=8)
    slowest = max(ms.values()) / ms["random"]
    row = {"work": "topk hostile", "M": M, "N": N, "k": k, "ms": ms, "slowest_over_random": slowest}
    return {**row, "equals_full_sort": exact}


def time_calls(works: dict[str, Work], rounds: int = 12) -> dict[str, float]:
    """Median milliseconds of single calls, host and all, in turn."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 2):
        for name, work in works.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:  # the first compile
                times[name].append(start.elapsed_time(end))
    return {name: round(statistics.median(values), 4) for name, values in times.items()}


def bench_listed(M: int, N: int, H: int, peer: Any) -> dict[str, Any]:
    """Logits and top-k together. ms: replayed, with the launches that find no row left open; calls: from Python."""
    k, data, (start, end) = 2048, operands(M, N, H), causal(M, N)
    out, peer_out = (torch.empty(M, k, dtype=torch.int32, device="cuda") for _ in range(2))

    def pair() -> None:
        logits = peer_logits(peer, data, start, end)
        torch.ops._C.top_k_per_row_prefill(logits, start, end, peer_out, M, logits.stride(0), 1, k)

    def listed() -> None:
        indexer_topk(*data, start, end, k, out=out)

    listed()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    listed()
    peak = torch.cuda.max_memory_allocated() - before
    exact = torch.equal(out, topk(mqa_logits(*data, start, end), start, end, k))
    zero = (torch.zeros_like(data[0]), *data[1:])
    works: dict[str, Work] = {"cpkit": listed}
    calls: dict[str, Work] = {"cpkit": listed}
    if peer:
        works["peer"] = calls["peer"] = pair
    row = {"work": "logits and topk", "M": M, "N": N, "H": H, "k": k, "ms": time_together(works)}
    # apart: products of zeros take less power, and whoever ran behind them would run at a higher clock
    equal: dict[str, Work] = {"all equal": lambda: indexer_topk(*zero, start, end, k, out=out)}
    row |= {"all_equal_ms": time_together(equal)["all equal"], "calls_ms": time_calls(calls)}
    return {**row, "peak_bytes": peak, "equals_topk_of_logits": exact}


def random_shards(num_keys: int, ranks: int, interleave: int) -> KeyShards:
    """One request's keys as an all-gather leaves them."""
    held, device = num_keys // ranks, torch.device("cuda")
    packed = torch.empty(ranks, packed_bytes(held, 128), dtype=torch.uint8, device=device)
    local_start = torch.tensor([0, held], dtype=torch.int32, device=device)
    shards = KeyShards(packed, local_start, 128, interleave)
    for shard in shards.shards():
        values = torch.randn(held, 128, device=device).to(torch.float8_e4m3fn)
        shard.fill(values, torch.rand(held, device=device) + 0.5)
    return shards


def bench_shards(M: int, N: int, H: int, ranks: int, interleave: int) -> dict[str, Any]:
    """Keys of DCP ranks scored where an all-gather left them, and put into token order first."""
    (q, _, weights), bounds, k = operands(M, N, H), causal(M, N), 2048
    shards, out = random_shards(N, ranks, interleave), torch.empty(M, N, device="cuda")
    workspace = keys_out(None, N, 128, q.device)

    def ordered() -> IndexKeys:
        return gather_keys(shards, out=workspace, backend="triton")

    same = torch.equal(indexer_topk(q, shards, weights, *bounds, k), indexer_topk(q, ordered(), weights, *bounds, k))
    works: dict[str, Work] = {
        "logits": lambda: mqa_logits(q, shards, weights, *bounds, out=out),
        "logits, ordered first": lambda: mqa_logits(q, ordered(), weights, *bounds, out=out),
        "logits and topk": lambda: indexer_topk(q, shards, weights, *bounds, k),
        "logits and topk, ordered first": lambda: indexer_topk(q, ordered(), weights, *bounds, k),
    }
    row = {"work": "shards", "M": M, "N": N, "H": H, "k": k, "ranks": ranks, "interleave": interleave}
    return {**row, "ms": time_together(works), "equals_ordered": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with deep_gemm/ and vllm_c.so")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/indexer.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    deep_gemm = None
    if args.peers:
        sys.path.insert(0, str(args.peers))
        import deep_gemm

        torch.ops.load_library(str(args.peers / "vllm_c.so"))
    peers, ceiling = bool(args.peers), ceilings()
    rows = [bench_logits(*shape, deep_gemm, ceiling) for shape in LOGITS_SHAPES]
    rows += [bench_skewed(4096, 131072, 64)]
    rows += [bench_listed(*shape, deep_gemm) for shape in LISTED_SHAPES]
    rows += [bench_shards(*shape) for shape in SHARDS_SHAPES]
    rows += [bench_topk(*shape, peers, ceiling) for shape in TOPK_SHAPES]
    rows += [bench_decode(*shape, peers, ceiling) for shape in DECODE_SHAPES]
    rows += [bench_hostile(4096, 131072, 2048)]
    for row in rows:
        if "peer" in row["ms"]:
            row["time_over_peer"] = row["ms"]["cpkit"] / row["ms"]["peer"]
        print(row)
    names = "vllm 0.33.0: DeepGEMM fp8_fp4_mqa_logits, top_k_per_row_prefill, cooperative_topk, persistent_topk"
    write_result(args.out, peers=names if peers else "none", ceilings=ceiling, rows=rows)


if __name__ == "__main__":
    main()
