"""Time the cache and gather kernels on one GPU, or under torchrun on several, and write benchmarks/results/gather.json.

    PYTHONPATH=. python benchmarks/gather.py [--peers DIR]
    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gather.py

DIR holds the peers: `vllm_c.so` (vllm's custom operations); without it cpkit runs beside torch alone. Each case is
checked, then timed by CUDA-graph replay over more memory than the cache holds, competitors in turn. On several GPUs
every rank replays graphs of EXCHANGES exchanges, and a time is the slowest rank's; `overlap` is host-launched: chunks
whose keys are gathered, then worked on by a matrix product, one after another or with the next gather under way. The
floor is the bytes at the copy rate measured in the same run; between GPUs at the rate of a copy from another GPU,
likewise. Either run replaces its own part of the file.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import COPIES, Case, run_case
from benchmarks.gather_ranks import several
from benchmarks.index_keys import BLOCK, DIM, ROW, SIZES, paged, same, some_bytes
from benchmarks.timing import Work, copy_gb_per_s, keep_part
from cpkit.comm.launcher import detect
from cpkit.kernels.deinterleave import deinterleave_idx_reference
from cpkit.kernels.gather_keys import gather_keys, keys_out
from cpkit.kernels.index_cache import quantize_index_keys
from cpkit.kernels.key_shards import IndexKeys, KeyShards, packed_bytes
from cpkit.kernels.paged_rows import read_rows, write_rows
from cpkit.kernels.table_keys import table_keys

FAR_BYTES = 256 << 20
"""Several times what the chip's cache holds."""


def whole(num_keys: int) -> torch.Tensor:
    """One region."""
    return torch.tensor([0, num_keys], dtype=torch.int32, device="cuda")


def rotated(make: Callable[[], Case]) -> Case:
    """A case over several sets of memory in turn, so that the chip's cache holds none of it from the call before."""
    sets = [make()]
    sets += [make() for _ in range(FAR_BYTES // sets[0].num_bytes)]
    cycles = {name: itertools.cycle([one.works[name] for one in sets]) for name in sets[0].works}
    works: dict[str, Work] = {name: lambda cycle=cycle: next(cycle)() for name, cycle in cycles.items()}

    def check() -> None:
        for one in sets:
            one.check()

    return replace(sets[0], works=works, check=check)


def reorder_case(num_keys: int, dcp_size: int, interleave: int) -> Case:
    shard = num_keys // dcp_size
    shards = KeyShards(some_bytes(dcp_size, packed_bytes(shard, DIM)), whole(shard), DIM, interleave)
    idx = deinterleave_idx_reference(shards.local_start.long(), num_keys, dcp_size=dcp_size, interleave=interleave)
    values, scales = shards.by_rank()
    rows, flat = values.view(torch.uint8).reshape(num_keys, DIM), scales.reshape(-1)
    out = keys_out(None, num_keys, DIM, values.device)

    def select() -> IndexKeys:
        return rows.index_select(0, idx).view(torch.float8_e4m3fn), flat.index_select(0, idx)

    def reorder() -> IndexKeys:
        return gather_keys(shards, out=out, backend="triton")

    return Case(
        "gather_keys",
        f"{num_keys} keys of {dcp_size} ranks, interleave {interleave}",
        {"cpkit": reorder, "two index_select": select},
        2 * packed_bytes(num_keys, DIM),
        lambda: same(reorder(), select()),
        target_us=110.0 if num_keys == 1 << 20 else None,
    )


def table_case(num_keys: int, vllm: Any) -> Case:
    cache, table = paged(num_keys)
    out = keys_out(None, num_keys, DIM, cache.device)

    def own() -> IndexKeys:
        return table_keys(cache, table, DIM, out=out, backend="triton")

    works: dict[str, Work] = {"cpkit": own}
    if vllm:
        values, scales = some_bytes(num_keys, DIM), some_bytes(num_keys, 4)
        view, values = cache.view(-1, BLOCK, ROW), values.view(torch.float8_e4m3fn)
        works["vllm"] = lambda: vllm.cp_gather_indexer_k_quant_cache(
            view, values, scales, table.block_tables, table.local_start
        )
    num_bytes, target = 2 * packed_bytes(num_keys, DIM), 12.0 if num_keys == 131_072 else None
    shape = f"{num_keys} keys of 4 requests, blocks of {BLOCK}"
    return Case(
        "table_keys", shape, works, num_bytes, lambda: same(own(), table_keys(cache, table, DIM)), target_us=target
    )


def quantize_case(num_keys: int, vllm: Any) -> Case:
    keys = torch.randn(num_keys, DIM, device="cuda").bfloat16()
    cache = some_bytes(num_keys // BLOCK + 4, BLOCK * ROW)
    slots = torch.randperm(len(cache) * BLOCK, device="cuda")[:num_keys]
    want = cache.clone()

    def own() -> None:
        quantize_index_keys(cache, keys, slots, block_size=BLOCK, backend="triton")

    def check() -> None:
        own()
        quantize_index_keys(want, keys, slots, block_size=BLOCK)
        assert torch.equal(cache, want), "caches differ"

    works: dict[str, Work] = {"cpkit": own}
    if vllm:
        view = torch.zeros_like(cache).view(-1, BLOCK, ROW)
        works["vllm"] = lambda: vllm.indexer_k_quant_and_cache(keys, view, slots, DIM, "fp32")
    num_bytes = num_keys * (2 * DIM + 8 + ROW)
    return Case("quantize_index_keys", f"{num_keys} bf16 keys", works, num_bytes, check, target_us=15.0)


def stored_rows(num_rows: int, row_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A latent cache and slots in random order."""
    cache = some_bytes(num_rows // BLOCK + 4, BLOCK * row_bytes)
    return cache, torch.randperm(len(cache) * BLOCK, device="cuda")[:num_rows]


def read_case(num_rows: int, main: int, side: int) -> Case:
    cache, slots = stored_rows(num_rows, main + side)
    read = {"block_size": BLOCK, "main_bytes": main, "side_bytes": side}

    def own() -> torch.Tensor:
        return read_rows(cache, slots, **read, backend="triton")

    def check() -> None:
        assert torch.equal(own(), read_rows(cache, slots, **read)), "rows differ"

    works: dict[str, Work] = {"cpkit": own}
    if not side:
        works["index_select"] = lambda: cache.view(-1, main).index_select(0, slots)
    num_bytes = num_rows * (2 * (main + side) + 8)
    return Case("read_rows", f"{num_rows} rows of {main + side} bytes", works, num_bytes, check)


def write_case(num_rows: int, main: int, side: int) -> Case:
    cache, slots = stored_rows(num_rows, main + side)
    rows, want = some_bytes(num_rows, main + side), cache.clone()
    write = {"block_size": BLOCK, "side_bytes": side}

    def own() -> None:
        write_rows(cache, rows, slots, **write, backend="triton")

    def check() -> None:
        own()
        write_rows(want, rows, slots, **write)
        assert torch.equal(cache, want), "caches differ"

    num_bytes = num_rows * (2 * (main + side) + 8)
    return Case("write_rows", f"{num_rows} rows of {main + side} bytes", {"cpkit": own}, num_bytes, check)


def single(vllm: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    gb_per_s = copy_gb_per_s()
    makes: list[Callable[[], Case]] = [
        partial(reorder_case, n, *world) for n in SIZES for world in ((8, 64), (8, 1), (2, 64), (2, 1))
    ]
    makes += [partial(table_case, n, vllm) for n in SIZES] + [partial(quantize_case, 65_536, vllm)]
    makes += [partial(make, 65_536, *form) for form in ((656, 0), (576, 8)) for make in (read_case, write_case)]
    rows = []
    for make in makes:
        rows.append(run_case(rotated(make), gb_per_s))
        print(rows[-1], flush=True)
    return {"copy_gb_per_s": round(gb_per_s), "copies": COPIES}, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with vllm_c.so")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gather.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    launch = detect()
    vllm = None
    if args.peers:
        torch.ops.load_library(str((args.peers / "vllm_c.so").resolve()))
        vllm = torch.ops._C_cache_ops
    many = launch.world_size > 1
    setup, rows = several() if many else single(vllm)
    if launch.rank == 0:
        keep_part(args.out, "several_gpus" if many else "one_gpu", {"setup": setup, "rows": rows})


if __name__ == "__main__":
    main()
