"""Time the decode logits over pages on a Hopper GPU beside DeepGEMM, and write benchmarks/results/decode_logits.json.

    PYTHONPATH=. python benchmarks/decode_logits.py [--peers DIR]

DIR holds the peer: `deep_gemm/` (importable). Times are medians of single CUDA-graph replays, peer and cpkit in turn in
the same process, both with their schedule of pages made beforehand. The floor is the bytes of all keys at the rate at
which a kernel of the same run reads and writes memory. The file is written anew after each shape.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import copy_gb_per_s, time_together, write_result
from cpkit.kernels.paged_mqa_logits import PAGE_BYTES, PAGE_KEYS, paged_mqa_logits, paged_mqa_logits_reference
from cpkit.kernels.tile_schedule import tile_schedule

SHAPES = [  # query tokens of a row, index heads, keys of the rows
    (1, 64, [131072] * 64),
    (2, 64, [131072] * 64),
    (4, 64, [131072] * 64),
    (3, 64, [131072] * 64),
    (1, 32, [131072] * 64),
    (1, 64, [131072] * 16),
    (2, 64, [131072] * 16),
    (1, 64, [1 << 20] * 4),
    (1, 64, [1 << 20] + [1024] * 63),
    (1, 64, [4096 * (1 + i % 32) for i in range(64)]),
]
PEER_TOKENS = (1, 2, 4)


def make(tokens: int, H: int, lens: list[int]) -> dict[str, Any]:
    """Random queries and keys; the pages of all rows lie in the cache in random order."""
    rows, width = len(lens), max(lens) // PAGE_KEYS
    q = torch.randn(rows, tokens, H, 128, device="cuda").to(torch.float8_e4m3fn)
    pages = [-(-n // PAGE_KEYS) for n in lens]
    order = torch.randperm(sum(pages), device="cuda", dtype=torch.int32)
    tables = torch.zeros(rows, width, dtype=torch.int32, device="cuda")
    for row, part in enumerate(order.split(pages)):
        tables[row, : len(part)] = part
    keys = torch.randn(sum(pages), PAGE_KEYS * 128, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(sum(pages), PAGE_KEYS, device="cuda").add_(0.5).view(torch.uint8)
    ends = torch.tensor(lens, dtype=torch.int32, device="cuda")[:, None]
    ends = (ends - torch.arange(tokens - 1, -1, -1, dtype=torch.int32, device="cuda")).contiguous()
    schedule = torch.empty(
        torch.cuda.get_device_properties(0).multi_processor_count + 1, 2, dtype=torch.int32, device="cuda"
    )
    tile_schedule(ends.amax(1), tile=PAGE_KEYS, out=schedule)
    return {
        "q": q, "cache": torch.cat([keys, scales], dim=1), "weights": torch.randn(rows * tokens, H, device="cuda"),
        "seq_lens": ends, "block_tables": tables, "max_keys": max(lens), "schedule": schedule,
    }  # fmt: skip


def bench(tokens: int, H: int, lens: list[int], deep_gemm: Any, gb_per_s: float) -> dict[str, Any]:
    """One shape: its first and last rows against the reference, then times."""
    data = make(tokens, H, lens)
    out = torch.full((len(lens) * tokens, data["max_keys"]), float("nan"), device="cuda")
    works = {"cpkit": lambda: paged_mqa_logits(**data, out=out, backend="triton")}
    works["cpkit"]()
    for row in {0, len(lens) - 1}:
        part = {name: data[name][row : row + 1] for name in ("q", "seq_lens", "block_tables")}
        part |= {"weights": data["weights"][row * tokens : (row + 1) * tokens], "cache": data["cache"]}
        want = paged_mqa_logits_reference(**part, max_keys=data["max_keys"])
        torch.testing.assert_close(
            out[row * tokens : (row + 1) * tokens], want, rtol=2e-3, atol=2e-3 * float(want.nan_to_num().abs().max()),
            equal_nan=True,
        )  # fmt: skip
    if deep_gemm is not None and tokens in PEER_TOKENS:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        slots = sms // 2 if tokens == 4 else sms
        plan = deep_gemm.get_paged_mqa_logits_metadata(data["seq_lens"], PAGE_KEYS, slots)
        cache = data["cache"].view(-1, PAGE_KEYS, 1, 132)
        works["peer"] = lambda: deep_gemm.fp8_fp4_paged_mqa_logits(
            (data["q"], None), cache, data["weights"], data["seq_lens"], data["block_tables"], plan, data["max_keys"]
        )
    ms = time_together(works)
    num_bytes = sum(-(-n // PAGE_KEYS) for n in lens) * PAGE_BYTES + 4 * tokens * sum(lens)
    row = {"tokens": tokens, "heads": H, "rows": len(lens), "keys": sum(lens), "longest": max(lens), "ms": ms}
    row |= {"floor_ms": round(num_bytes / gb_per_s / 1e6, 4), "gb_per_s": round(num_bytes / ms["cpkit"] / 1e6)}
    if "peer" in ms:
        row["times_faster_than_peer"] = round(ms["peer"] / ms["cpkit"], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with deep_gemm/")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode_logits.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    deep_gemm = None
    if args.peers:
        sys.path.insert(0, str(args.peers))
        import deep_gemm
    rate = copy_gb_per_s()
    peers = "vllm 0.33.0: DeepGEMM fp8_fp4_paged_mqa_logits" if args.peers else "none"
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        rows.append(bench(*shape, deep_gemm, rate))
        print(rows[-1], flush=True)
        write_result(args.out, peers=peers, copy_gb_per_s=round(rate), rows=rows)


if __name__ == "__main__":
    main()
