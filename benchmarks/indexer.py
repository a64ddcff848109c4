"""Time the indexer kernels on a Hopper GPU beside the published ones, and write benchmarks/results/indexer.json.

    PYTHONPATH=. python benchmarks/indexer.py [--peers DIR]

DIR holds the peers: `deep_gemm/` (importable) and `vllm_c.so` (vllm's custom operations); without it cpkit runs alone.
Times are medians of single CUDA-graph replays, peer and cpkit in turn in the same process. The ceilings are measured
in the same run: a kernel that negates (bytes read and written) and an fp8 matrix product of 8,192 cubed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Work, copy_gb_per_s, time_together, write_result
from cpkit.kernels.mqa_logits import mqa_logits, mqa_logits_reference
from cpkit.kernels.topk import topk, topk_reference

LOGITS_SHAPES = [  # query rows, keys, index heads; the rows are the last tokens of one request
    (4096, 131072, 64), (2048, 16384, 64), (8192, 8192, 64), (4096, 131072, 32), (8192, 8192, 32),
]  # fmt: skip
TOPK_SHAPES = [
    (4096, 131072, 2048),
    (4096, 131072, 1024),
    (4096, 131072, 512),
    (512, 1 << 20, 2048),
    (8192, 8192, 2048),
]


def causal(M: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    end = torch.arange(N - M + 1, N + 1, dtype=torch.int32, device="cuda")
    return torch.zeros_like(end), end


def ceilings() -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    ms = time_together({"product": product})["product"]
    return {"copy_gb_per_s": copy_gb_per_s(), "fp8_tflops": 2 * 8192**3 / ms / 1e9}


def bench_logits(M: int, N: int, H: int, peer: Any, ceiling: dict[str, float]) -> dict[str, Any]:
    q = torch.randn(M, H, 128, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(N, 128, device="cuda").to(torch.float8_e4m3fn)
    scale, weights = torch.rand(N, device="cuda") + 0.5, torch.randn(M, H, device="cuda")
    start, end = causal(M, N)
    out = torch.empty(M, N, device="cuda")
    works: dict[str, Work] = {"cpkit": lambda: mqa_logits(q, k, scale, weights, start, end, out=out)}
    if peer:
        works["peer"] = lambda: peer.fp8_fp4_mqa_logits((q, None), (k, scale), weights, start, end, N)
    ms = time_together(works)
    some = torch.arange(0, M, M // 8, device="cuda")
    want = mqa_logits_reference(q[some], k, scale, weights[some], start[some], end[some])
    error = ((out[some] - want).nan_to_num().norm() / want.nan_to_num().norm()).item()
    flops = 2 * 128 * H * int((end - start).sum())
    row = {"work": "mqa_logits", "M": M, "N": N, "H": H, "ms": ms, "tflops": flops / ms["cpkit"] / 1e9}
    return {**row, "floor_ms": flops / ceiling["fp8_tflops"] / 1e9, "relative_error": error}


def bench_topk(M: int, N: int, k: int, peer: bool, ceiling: dict[str, float]) -> dict[str, Any]:
    logits = torch.randn(M, N, device="cuda")
    start, end = causal(M, N)
    out, peer_out = (torch.empty(M, k, dtype=torch.int32, device="cuda") for _ in range(2))
    works: dict[str, Work] = {"cpkit": lambda: topk(logits, start, end, k, out=out)}
    if peer:
        call = torch.ops._C.top_k_per_row_prefill
        works["peer"] = lambda: call(logits, start, end, peer_out, M, logits.stride(0), 1, k)
    ms = time_together(works)
    some = torch.arange(0, M, max(M // 64, 1), device="cuda")
    want = topk_reference(logits[some], start[some], end[some], k).sort(dim=1).values
    exact = torch.equal(out[some].sort(dim=1).values, want)
    floor = 4 * int((end - start).sum()) / ceiling["copy_gb_per_s"] / 1e6
    return {"work": "topk", "M": M, "N": N, "k": k, "ms": ms, "floor_ms": floor, "equals_full_sort": exact}


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
    ceiling = ceilings()
    rows = [bench_logits(*shape, deep_gemm, ceiling) for shape in LOGITS_SHAPES]
    rows += [bench_topk(*shape, bool(args.peers), ceiling) for shape in TOPK_SHAPES]
    for row in rows:
        ratio = f"x{row['ms']['peer'] / row['ms']['cpkit']:.3f} of the peer" if "peer" in row["ms"] else ""
        print({name: value for name, value in row.items() if name != "tflops"}, ratio)
    peers = "vllm 0.33.0: DeepGEMM fp8_fp4_mqa_logits, top_k_per_row_prefill" if args.peers else "none"
    write_result(args.out, peers=peers, ceilings=ceiling, rows=rows)


if __name__ == "__main__":
    main()
