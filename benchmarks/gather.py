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
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import COPIES, Case, run_case
from benchmarks.timing import Work, copy_gb_per_s, time_together, write_result
from cpkit.comm.connect import make_comm
from cpkit.comm.key_gather import GATHERS, in_turn, make_key_gather
from cpkit.comm.launcher import detect
from cpkit.comm.symmetric import PeerGroup
from cpkit.comm.torch_dist import NcclComm
from cpkit.kernels.deinterleave import deinterleave_idx_reference
from cpkit.kernels.gather_keys import IndexKeys, gather_keys, keys_out, packed_bytes, pull_keys, split_planes
from cpkit.kernels.index_cache import quantize_index_keys
from cpkit.kernels.paged_rows import read_rows, write_rows
from cpkit.kernels.table_keys import KeyTable, pull_table_keys, table_keys
from cpkit.topology import Topology

DIM, BLOCK = 128, 64
ROW = DIM + 4
SIZES = (131_072, 1 << 20)
EXCHANGES, CHUNKS = 10, 8
FAR_BYTES = 256 << 20
"""Several times what the chip's cache holds."""


def some_bytes(*shape: int) -> torch.Tensor:
    """Random bytes without the two NaN codes of e4m3, so that results compare as numbers too."""
    return torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")


def same(got: IndexKeys, want: IndexKeys) -> None:
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)), "values differ"
    assert torch.equal(got[1].view(torch.int32), want[1].view(torch.int32)), "scales differ"


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
    values, scales = split_planes(some_bytes(dcp_size, packed_bytes(shard, DIM)), shard, DIM)
    start = whole(shard)
    idx = deinterleave_idx_reference(start.long(), num_keys, dcp_size=dcp_size, interleave=interleave)
    rows, flat = values.view(torch.uint8).reshape(num_keys, DIM), scales.reshape(-1)
    out = keys_out(None, num_keys, DIM, values.device)

    def select() -> IndexKeys:
        return rows.index_select(0, idx).view(torch.float8_e4m3fn), flat.index_select(0, idx)

    def reorder() -> IndexKeys:
        return gather_keys(values, scales, start, interleave=interleave, out=out, backend="triton")

    return Case(
        "gather_keys",
        f"{num_keys} keys of {dcp_size} ranks, interleave {interleave}",
        {"cpkit": reorder, "two index_select": select},
        2 * packed_bytes(num_keys, DIM),
        lambda: same(reorder(), select()),
        target_us=110.0 if num_keys == 1 << 20 else None,
    )


def paged(num_keys: int) -> tuple[torch.Tensor, KeyTable]:
    """A cache whose blocks lie in random order, and the table of 4 requests that fill it."""
    num_blocks = num_keys // BLOCK
    cache = some_bytes(num_blocks, BLOCK * ROW)
    tables = torch.randperm(num_blocks, device="cuda").int().view(4, -1)
    start = torch.arange(5, dtype=torch.int32, device="cuda") * (num_keys // 4)
    return cache, KeyTable(start, tables, start.diff().int(), num_keys, BLOCK)


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


def slowest(ms: dict[str, float]) -> dict[str, float]:
    """Microseconds of the slowest rank."""
    times = torch.tensor(list(ms.values()), device="cuda", dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return {name: round(1e3 * one, 1) for name, one in zip(ms, times.tolist(), strict=True)}


def check_exchange(works: dict[str, Work], want: IndexKeys, out: IndexKeys, shape: str) -> None:
    """Each way gives the keys that the selects gave; out: what most of them write into."""
    for name, work in works.items():
        for part in out:
            part.view(torch.uint8).fill_(255)
        got = work()
        torch.cuda.synchronize()
        try:
            same(got, want)
        except AssertionError as differ:
            raise AssertionError(f"{name}, {shape}: {differ}") from differ
        dist.barrier()


def exchange_row(peers: PeerGroup, place: int, num_keys: int, interleave: int) -> dict[str, Any]:
    """All ways from the ranks' shards to keys in token order, contiguous shards first, then from the pages."""
    shard, size = num_keys // peers.size, peers.size
    num_bytes = packed_bytes(shard, DIM)
    torch.manual_seed(place)
    cache, table = paged(shard)
    torch.manual_seed(99)  # all ranks have the same block tables
    tables = torch.randperm(len(cache), device="cuda").int().view(4, -1)
    table = KeyTable(table.local_start, tables, table.key_lens, shard, BLOCK)
    everywhere = KeyTable(table.local_start, tables, (table.key_lens * size).int(), shard, BLOCK)
    pages = peers.allocate(cache.numel())
    pages.own.copy_(cache.view(-1))
    buffers = [peers.allocate(num_bytes) for _ in range(2)]
    packed = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    for one in (packed, *(buffer.own for buffer in buffers)):
        parts = split_planes(one[None], shard, DIM)
        table_keys(cache, table, DIM, out=(parts[0][0], parts[1][0]), backend="triton")
    mine = split_planes(packed[None], shard, DIM)
    values, scales = mine[0][0].view(torch.uint8).clone(), mine[1][0].clone()
    idx = deinterleave_idx_reference(table.local_start.long(), num_keys, dcp_size=size, interleave=interleave)
    all_values, all_scales = values.new_empty(num_keys, DIM), scales.new_empty(num_keys)
    gathered = packed.new_empty(size, num_bytes)
    out = keys_out(None, num_keys, DIM, cache.device)

    def selects() -> IndexKeys:
        dist.all_gather_into_tensor(all_values, values)
        dist.all_gather_into_tensor(all_scales, scales)
        return all_values.index_select(0, idx).view(torch.float8_e4m3fn), all_scales.index_select(0, idx)

    def collective() -> IndexKeys:
        dist.all_gather_into_tensor(gathered, packed)
        parts = split_planes(gathered, shard, DIM)
        return gather_keys(*parts, table.local_start, interleave=interleave, out=out, backend="triton")

    def symmetric() -> IndexKeys:
        peers.meet(num_bytes, what="index_keys")
        buffers.reverse()
        return pull_keys(buffers[0].addresses, table.local_start, shard, DIM, interleave=interleave, out=out)

    def fill(buffer: torch.Tensor) -> None:
        parts = split_planes(buffer[None], shard, DIM)
        table_keys(cache, table, DIM, out=(parts[0][0], parts[1][0]), backend="triton")

    def paged_collective() -> IndexKeys:
        fill(packed)
        return collective()

    def paged_symmetric() -> IndexKeys:
        fill(buffers[1].own)
        return symmetric()

    def direct() -> IndexKeys:
        peers.meet(num_bytes, what="index_keys")
        return pull_table_keys(
            pages.addresses, pages.own.view_as(cache), everywhere, DIM, interleave=interleave, out=out
        )

    want = selects()
    works: dict[str, Work] = {
        "2 all-gathers + 2 selects": selects,
        "collective": collective,
        "symmetric": symmetric,
        "pages, collective": paged_collective,
        "pages, symmetric": paged_symmetric,
        "pages, direct": direct,
    }
    check_exchange(works, want, out, f"{num_keys} keys, interleave {interleave}")
    peers.check()
    torch.cuda.synchronize()
    time.sleep(0.5)  # the comm's watch has seen all calls done, and leaves the captures alone
    us = slowest(time_together(works, EXCHANGES))
    peers.check()
    row: dict[str, Any] = {"work": "exchange", "shape": f"{num_keys} keys of {size} ranks, interleave {interleave}"}
    ratio = {name: round(us["2 all-gathers + 2 selects"] / one, 2) for name, one in us.items()}
    return {**row, "us": us, "times_faster_than_selects": ratio}


def overlap_row(comm: NcclComm, name: str, num_keys: int) -> dict[str, Any]:
    """Microseconds a chunk of CHUNKS chunks in a row."""
    shard = num_keys // comm.size
    gather = make_key_gather(comm, name, dim=DIM, max_keys=shard, backend="triton", timeout_s=20)
    torch.manual_seed(99)
    chunks = [paged(shard)] * CHUNKS
    a, b = (torch.randn(4096, 8192, device="cuda").bfloat16() for _ in range(2))

    def work() -> None:
        torch.mm(a, b.t())
        torch.mm(a, b.t())

    def one_by_one() -> None:
        for cache, table in chunks:
            gather.start(cache, table, interleave=64).wait()
            work()

    def overlapped() -> None:
        for _ in in_turn(gather, chunks, interleave=64):
            work()

    def work_alone() -> None:
        for _ in chunks:
            work()

    works = {"work alone": work_alone, "one by one": one_by_one, "overlapped": overlapped}
    times: dict[str, list[float]] = {kind: [] for kind in works}
    for _ in range(7):
        for kind, run in works.items():
            comm.barrier("world")
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times[kind].append(start.elapsed_time(end) / CHUNKS)
    gather.check()
    us = slowest({kind: statistics.median(values[2:]) for kind, values in times.items()})
    return {"work": "overlap", "shape": f"{CHUNKS} chunks of {num_keys} keys of {comm.size} ranks, {name}", "us": us}


def peer_copy_gb_per_s(peers: PeerGroup, place: int) -> float:
    """Rate of torch's copy from the next rank's memory."""
    memory = peers.allocate(1 << 28)
    memory.own.fill_(place)
    other = memory.handle.get_buffer((dist.get_rank() + 1) % peers.size, (1 << 28,), torch.uint8)
    target = torch.empty_like(memory.own)
    peers.meet(0, what="index_keys")
    us = slowest(time_together({"copy": lambda: target.copy_(other)}, 3))["copy"]
    return (1 << 28) / us / 1e3


def several() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    size = detect().world_size
    with make_comm(Topology(pcp=size, dcp=size), kind="torch", device="cuda", timeout_s=60) as comm:
        peers, place = PeerGroup(comm, "dcp", timeout_s=20), comm.group("dcp").place
        gb_per_s = peer_copy_gb_per_s(peers, place)
        rows = []
        for num_keys in SIZES:
            for interleave in (64, 1):
                row = exchange_row(peers, place, num_keys, interleave)
                remote = packed_bytes(num_keys, DIM) * (size - 1) // size
                row["floor_us"] = round(remote / gb_per_s / 1e3, 1)
                if num_keys == 1 << 20:
                    row["target_us"] = {"collective": 400, "symmetric": 230}
                rows.append(row)
                if comm.rank == 0:
                    print(row, flush=True)
        for name in GATHERS:
            rows.append(overlap_row(comm, name, 1 << 20))
            if comm.rank == 0:
                print(rows[-1], flush=True)
    return {"peer_copy_gb_per_s": round(gb_per_s), "gpus": size, "exchanges": EXCHANGES}, rows


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
        parts = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        kept = {name: parts[name] for name in ("one_gpu", "several_gpus") if name in parts}
        kept["several_gpus" if many else "one_gpu"] = {"setup": setup, "rows": rows}
        write_result(args.out, **kept)


if __name__ == "__main__":
    main()
