"""The exchange of index keys between GPUs, each way that there is, and its overlap with work: part of gather.py."""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.index_keys import BLOCK, DIM, SIZES, paged, same
from benchmarks.timing import Work, time_together
from cpkit.comm.connect import make_comm
from cpkit.comm.key_gather import GATHERS, in_turn, make_key_gather
from cpkit.comm.launcher import detect
from cpkit.comm.symmetric import PeerGroup
from cpkit.comm.torch_dist import NcclComm
from cpkit.kernels.deinterleave import deinterleave_idx_reference
from cpkit.kernels.gather_keys import gather_keys, keys_out, pull_keys, split_planes
from cpkit.kernels.key_shards import IndexKeys, KeyShards, empty_shard, packed_bytes
from cpkit.kernels.table_keys import KeyTable, pack_table_keys, pull_table_keys, table_keys
from cpkit.topology import Topology

EXCHANGES, CHUNKS = 10, 8


def slowest(ms: dict[str, float]) -> dict[str, float]:
    """Microseconds of the slowest rank."""
    times = torch.tensor(list(ms.values()), device="cuda", dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return {name: round(1e3 * one, 1) for name, one in zip(ms, times.tolist(), strict=True)}


def let_watch_rest() -> None:
    """Return when the comm's watch has seen all calls done: a look of its thread would break a capture."""
    torch.cuda.synchronize()
    time.sleep(0.5)


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


def rank_pages(place: int, shard: int, size: int) -> tuple[torch.Tensor, KeyTable, KeyTable]:
    """A rank's cache, and by block tables that all ranks have the same: its own keys, and those of all."""
    torch.manual_seed(place)
    cache, table = paged(shard)
    torch.manual_seed(99)
    tables = torch.randperm(len(cache), device="cuda").int().view(4, -1)
    own = KeyTable(table.local_start, tables, table.key_lens, shard, BLOCK)
    return cache, own, KeyTable(table.local_start, tables, (table.key_lens * size).int(), shard, BLOCK)


def exchange_row(peers: PeerGroup, place: int, num_keys: int, interleave: int) -> dict[str, Any]:
    """All ways from the ranks' shards to keys in token order, contiguous shards first, then from the pages."""
    size = peers.size
    shard = num_keys // size
    num_bytes = packed_bytes(shard, DIM)
    cache, table, everywhere = rank_pages(place, shard, size)
    pages = peers.allocate(cache.numel())
    pages.own.copy_(cache.view(-1))
    buffers = [peers.allocate(num_bytes) for _ in range(2)]
    planes = [split_planes(buffer.own, shard, DIM) for buffer in buffers]
    for parts in planes:
        table_keys(cache, table, DIM, out=parts, backend="triton")
    packed = empty_shard(place, shard, DIM, cache.device)
    pack_table_keys(cache, table, packed, backend="triton")
    values, scales = planes[0][0].view(torch.uint8).clone(), planes[0][1].clone()
    idx = deinterleave_idx_reference(table.local_start.long(), num_keys, dcp_size=size, interleave=interleave)
    all_values, all_scales = values.new_empty(num_keys, DIM), scales.new_empty(num_keys)
    gathered = cache.new_empty(size, num_bytes)
    shards = KeyShards(gathered, table.local_start, DIM, interleave)
    out = keys_out(None, num_keys, DIM, cache.device)

    def selects() -> IndexKeys:
        dist.all_gather_into_tensor(all_values, values)
        dist.all_gather_into_tensor(all_scales, scales)
        return all_values.index_select(0, idx).view(torch.float8_e4m3fn), all_scales.index_select(0, idx)

    def collective() -> IndexKeys:
        dist.all_gather_into_tensor(gathered, packed.packed)
        return gather_keys(shards, out=out, backend="triton")

    def symmetric() -> IndexKeys:
        peers.meet(num_bytes, what="index_keys")
        buffers.reverse()
        planes.reverse()
        return pull_keys(buffers[0].addresses, table.local_start, shard, DIM, interleave=interleave, out=out)

    def paged_collective() -> IndexKeys:
        pack_table_keys(cache, table, packed, backend="triton")
        return collective()

    def paged_symmetric() -> IndexKeys:
        table_keys(cache, table, DIM, out=planes[1], backend="triton")
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
    let_watch_rest()
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
    let_watch_rest()
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
