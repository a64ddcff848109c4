"""Cache and gather kernels on a GPU: the values of their torch references, to the bit, and meetings that end in time.

python tests/gpu/check_gather.py [--small]    needs CUDA; exits 0, or raises at the first difference

--small: less data, for compute-sanitizer.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from cpkit.kernels.fp8 import quantize_fp8
from cpkit.kernels.gather_keys import gather_keys, keys_out, pick_keys, pull_keys, split_planes
from cpkit.kernels.index_cache import quantize_index_keys
from cpkit.kernels.key_shards import IndexKeys, KeyShards, empty_shard, packed_bytes
from cpkit.kernels.meet import meet
from cpkit.kernels.paged_rows import read_rows, write_rows
from cpkit.kernels.table_keys import KeyTable, pack_table_keys, pull_table_keys, table_keys

DEVICE = torch.device("cuda", 0)
DIM = 128
SMALL = [(1, 1, [3]), (2, 1, [3, 1]), (3, 5, [0, 70, 1, 0, 65]), (2, 64, [1] * 100), (2, 3, [0])]
LARGE = [(8, 1, [4096]), (8, 64, [100, 0, 7000, 1]), (2, 64, [70_000]), (5, 7, [13] * 900)]


def same(where: object, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits; of floats: equal numbers, or NaN on both sides."""
    if got.dtype == torch.float8_e4m3fn:
        got, want = got.float(), want.float()
    equal = (got == want) | ((got != got) & (want != want))
    if got.shape != want.shape or not equal.all():
        at = tuple(int(i) for i in (~equal).nonzero()[0])
        raise AssertionError(f"{where}: {got[at].item()} from the kernel at {at}, {want[at].item()} from the reference")


def same_keys(where: object, got: IndexKeys, want: IndexKeys) -> None:
    same(where, got[0].view(torch.uint8), want[0].view(torch.uint8))
    same(where, got[1].view(torch.int32), want[1].view(torch.int32))


def some_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def starts(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=DEVICE)


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=DEVICE)


def check_gathers(shapes: list[tuple[int, int, list[int]]]) -> str:
    """Shards of one collective, and the same keys read from a buffer of each rank."""
    for dcp_size, interleave, held in shapes:
        keys = sum(held)
        shards = KeyShards(some_bytes(dcp_size, packed_bytes(keys, DIM)), starts(held), DIM, interleave)
        want = gather_keys(shards)
        same_keys(("gather_keys", dcp_size, interleave, held), gather_keys(shards, backend="triton"), want)
        at = torch.randint(0, max(shards.num_keys, 1), (min(shards.num_keys, 999),), device=DEVICE).int()
        picked = pick_keys(shards, at, backend="triton")
        same_keys(("pick_keys", dcp_size, interleave, held), picked, pick_keys(shards, at))
        if not keys:
            continue
        buffers = [torch.empty(packed_bytes(keys, DIM), dtype=torch.uint8, device=DEVICE) for _ in range(dcp_size)]
        for buffer, values, scales in zip(buffers, *shards.by_rank(), strict=True):
            own = split_planes(buffer, keys, DIM)
            own[0].view(torch.uint8).copy_(values.view(torch.uint8))
            own[1].view(torch.int32).copy_(scales.view(torch.int32))
        out = keys_out(None, dcp_size * keys, DIM, DEVICE)
        pull_keys(addresses(buffers), shards.local_start, keys, DIM, interleave=interleave, out=out)
        same_keys(("pull_keys", dcp_size, interleave, held), out, want)
    return f"{len(shapes)} shapes"


def packed(caches: list[torch.Tensor], table: KeyTable, backend: str) -> torch.Tensor:
    """What an all-gather leaves of the shards of all ranks, one cache each."""
    shards = [empty_shard(rank, table.num_keys, DIM, DEVICE) for rank in range(len(caches))]
    for cache, shard in zip(caches, shards, strict=True):
        pack_table_keys(cache, table, shard, backend=backend)
    return torch.stack([shard.packed for shard in shards])


def tables(lens: list[int], block_size: int, num_blocks: int) -> torch.Tensor:
    """Block tables with room for two keys more, some blocks outside the cache."""
    width = (max(lens) + 2) // block_size + 1
    table = torch.randint(0, num_blocks, (len(lens), width), device=DEVICE).int()
    table[0, -1], table[-1, 0] = 2**31 - 1, -1
    return table


def check_tables(shapes: list[tuple[int, int, list[int]]]) -> str:
    """Paged caches, this rank's and all ranks'; pages touch, or lie apart."""
    done = 0
    for (dcp_size, interleave, lens), block_size, gap in itertools.product(shapes, (1, 64), (0, 12)):
        num_blocks, page = 40, block_size * (DIM + 4)
        memory = [some_bytes(num_blocks * (page + gap)) for _ in range(dcp_size)]
        caches = [torch.as_strided(one, (num_blocks, page), (page + gap, 1)) for one in memory]
        block_tables, local_start = tables(lens, block_size, num_blocks), starts(lens)
        for first_key in (0, 2):
            where = ("table_keys", dcp_size, interleave, lens, block_size, gap, first_key)
            held = torch.tensor([max(n - 1, 0) for n in lens], dtype=torch.int32, device=DEVICE)
            table = KeyTable(local_start, block_tables, held, sum(lens), block_size, first_key)
            same_keys(where, table_keys(caches[0], table, DIM, backend="triton"), table_keys(caches[0], table, DIM))
            full = KeyTable(local_start, block_tables, starts(lens).diff(), sum(lens), block_size, first_key)
            sent = packed(caches, full, "torch")
            same(("pack_table_keys", *where[1:]), packed(caches, full, "triton"), sent)
            want = gather_keys(KeyShards(sent, local_start, DIM, interleave))
            whole = [n // interleave * interleave * dcp_size for n in lens]  # no clamped places among these
            keys = KeyTable(
                local_start, block_tables, torch.tensor(whole, device=DEVICE).int(), sum(lens), block_size, first_key
            )
            got = pull_table_keys(addresses(caches), caches[0], keys, DIM, interleave=interleave)
            exists = torch.cat(
                [torch.arange(n * dcp_size, device=DEVICE) < m for n, m in zip(lens, whole, strict=True)]
            )
            bytes_want = torch.where(exists[:, None], want[0].view(torch.uint8), 0)
            same(where, got[0].view(torch.uint8), bytes_want)
            same(where, got[1].view(torch.int32), torch.where(exists, want[1].view(torch.int32), 0))
            done += 1
    return f"{done} tables"


def spread_values(num: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of every size, some of them NaN, infinite or zero."""
    values = torch.randn(num, dim, device=DEVICE) * 10.0 ** torch.empty(num, 1, device=DEVICE).uniform_(-9, 4)
    for row, value in enumerate([float("nan"), float("inf"), -float("inf"), 0.0][: num - 1]):
        values[row, row % dim :: 64] = value
    return values.to(dtype)


def some_slots(num: int, capacity: int) -> torch.Tensor:
    slots = torch.randperm(capacity, device=DEVICE)[:num]
    slots[3::7], slots[4::9], slots[5::11] = -1, capacity, 2**40
    return slots


def check_caches(nums: list[int]) -> str:
    """Quantized values and scales, alone and in pages; rows of every cache there and back."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for num, dtype, pow2 in itertools.product(nums, dtypes, (False, True)):
        values = spread_values(num, DIM, dtype)
        for group_size in (64, 128):
            options = {"group_size": group_size, "pow2_scales": pow2}
            pairs = zip(quantize_fp8(values, backend="triton", **options), quantize_fp8(values, **options), strict=True)
            for part, (got, want) in enumerate(pairs):
                same(("quantize_fp8", num, dtype, pow2, group_size, part), got, want)
        values = values.nan_to_num(7.0, 7.0, 7.0)
        for block_size, gap in ((1, 0), (64, 0), (64, 12)):
            num_blocks = num // block_size + 2
            cache = some_bytes(num_blocks, block_size * (DIM + 4) + gap)
            again, slots = cache.clone(), some_slots(num, num_blocks * block_size)
            quantize_index_keys(cache, values, slots, block_size=block_size, pow2_scales=pow2)
            quantize_index_keys(again, values, slots, block_size=block_size, pow2_scales=pow2, backend="triton")
            same(("quantize_index_keys", num, dtype, pow2, block_size, gap), again, cache)
    for num, (main, side), block_size in itertools.product(nums, [(656, 0), (576, 8), (128, 4)], (1, 64)):
        num_blocks = num // block_size + 2
        cache = some_bytes(num_blocks, block_size * (main + side))
        again, slots, rows = cache.clone(), some_slots(num, num_blocks * block_size), some_bytes(num, main + side)
        write_rows(cache, rows, slots, block_size=block_size, side_bytes=side)
        write_rows(again, rows, slots, block_size=block_size, side_bytes=side, backend="triton")
        same(("write_rows", num, main, side, block_size), again, cache)
        read = {"block_size": block_size, "main_bytes": main, "side_bytes": side}
        found = read_rows(cache, slots, **read, backend="triton")
        same(("read_rows", num, main, side, block_size), found, read_rows(cache, slots, **read))
    return f"{len(nums)} numbers of keys"


def check_far_pages() -> str:
    """Pages and results behind byte 2^31."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        return "skipped: less than 12 GiB free"
    stride, page, block_size = 1_077_120, 4000, 64
    memory = torch.zeros((page + 1) * stride, dtype=torch.uint8, device=DEVICE)
    cache = torch.as_strided(memory, (page + 1, block_size * (DIM + 4)), (stride, 1))
    slots = torch.tensor([5, page * block_size + 63], device=DEVICE)
    quantize_index_keys(cache, spread_values(2, DIM, torch.bfloat16).nan_to_num(3.0), slots, block_size=block_size,
                        backend="triton")  # fmt: skip
    assert memory[page * stride :].any(), "nothing was written to the last page"
    lens = torch.tensor([block_size], dtype=torch.int32, device=DEVICE)
    table = KeyTable(starts([block_size]), torch.tensor([[page]], dtype=torch.int32, device=DEVICE), lens, 64, 64)
    same_keys("far page", table_keys(cache, table, DIM, backend="triton"), table_keys(cache, table, DIM))
    del memory, cache
    keys = (1 << 24) + 100  # 128 bytes each: past 2^31
    values = torch.empty(1, keys, DIM, dtype=torch.uint8, device=DEVICE)
    values.copy_(torch.arange(keys, device=DEVICE).view(1, -1, 1) % 251)
    scales = torch.arange(keys, device=DEVICE).float()[None]
    got = gather_keys(values.view(torch.float8_e4m3fn), scales, starts([keys]), interleave=1, backend="triton")
    same("far key", got[0].view(torch.uint8)[-200:], values[0, -200:])
    same("far scale", got[1], scales[0])
    return "beyond 2^31 bytes"


def ranks_of_one_gpu(size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pad and state of each rank."""
    for _ in range(size):
        yield tuple(torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (size, 2))  # type: ignore[misc]


def check_meetings() -> str:
    """Ranks as streams of one GPU: they meet over and over; one that never comes is missed, once, in time."""
    size = 3
    ranks = list(ranks_of_one_gpu(size))
    pads = addresses([pad for pad, _ in ranks])
    streams = [torch.cuda.Stream() for _ in range(size)]
    torch.cuda.synchronize()
    for _ in range(20):
        for place, (stream, (pad, state)) in enumerate(zip(streams, ranks, strict=True)):
            with torch.cuda.stream(stream):
                meet(pads, pad, state, place=place, timeout_s=20)
    torch.cuda.synchronize()
    for pad, state in ranks:
        assert state.tolist() == [20, 0] and pad.tolist() == [20] * size, (state, pad)
    pad, state = ranks[0]
    began = time.monotonic()
    for _ in range(5):
        meet(pads, pad, state, place=0, timeout_s=0.5)
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    assert state.tolist() == [25, 3] and 0.4 < seconds < 5, (state, seconds)
    return f"20 meetings of {size}; a missing rank noticed after {seconds:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was compared")
        return 2
    torch.manual_seed(0)
    shapes = SMALL if args.small else SMALL + LARGE
    print(f"check_gathers: {check_gathers(shapes)}", flush=True)
    print(f"check_tables: {check_tables(shapes)}", flush=True)
    print(f"check_caches: {check_caches([1, 33, 200] if args.small else [1, 33, 5000])}", flush=True)
    print(f"check_meetings: {check_meetings()}", flush=True)
    if not args.small:
        print(f"check_far_pages: {check_far_pages()}", flush=True)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
