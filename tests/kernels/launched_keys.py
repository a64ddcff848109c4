# ruff: noqa: E402  # what asks for a GPU is replaced before the kernels are imported
"""The keys that Triton would look up at each launch of the ranks of some worlds, beside those that warm_up lists.

    python -m tests.kernels.launched_keys WORLDS        JSON to JSON, by name; in a process of its own

Kernels are compiled functions here, on a machine without a GPU; a launch is replaced by writing down its key. Tensors
are of the meta device: sizes beyond 2^31 cost nothing.
"""

import json
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import cpkit.kernels.backends as border
import cpkit.kernels.gpu_kind
import cpkit.kernels.topk_cuda

# Tensors are nowhere: which GPU they are on is said by the world, and nothing is launched.
gpu, built = ["other"], []
cpkit.kernels.gpu_kind.gpu_kind = lambda device: gpu[0]
cpkit.kernels.topk_cuda.build = lambda device: built.append(device)
cpkit.kernels.topk_cuda.launch = lambda *args, **options: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132, major=9)

from cpkit.kernels.candidates import KeyOrder, token_order
from cpkit.kernels.compressed_slots import (
    StateBlocks,
    compressed_slots,
    packed_compressed_slots,
    unpack_compressed_slots,
)
from cpkit.kernels.dcp_local_lens import dcp_local_lens
from cpkit.kernels.decode_lens import DecodeRows, flat_decodes, native_decodes
from cpkit.kernels.deinterleave import deinterleave_idx
from cpkit.kernels.exchange_candidates import best_of_packed, join_packed, packed_candidates, packed_scores
from cpkit.kernels.fp8 import quantize_fp8
from cpkit.kernels.gather_keys import gather_keys, pick_keys, pull_keys
from cpkit.kernels.gather_lens import gather_lens
from cpkit.kernels.index_cache import gather_index_keys, quantize_index_keys
from cpkit.kernels.indexer_topk import select_listed
from cpkit.kernels.key_ranges import ChunkRows, KeyRanges, key_ranges_gathered, key_ranges_local
from cpkit.kernels.key_shards import KeyShards, empty_shard, packed_bytes
from cpkit.kernels.meet import meet
from cpkit.kernels.mqa_logits import mqa_logits
from cpkit.kernels.mqa_operands import Operands, reads_shards
from cpkit.kernels.paged_mqa_logits import paged_mqa_logits
from cpkit.kernels.paged_rows import read_rows, write_rows
from cpkit.kernels.position_slots import KeyBlocks, compact_shard_slots, compact_slots, gathered_slots, shard_slots
from cpkit.kernels.registry.sizes import KernelSizes
from cpkit.kernels.step_slots import StateSlots, TailSlots, TokenSlots, step_slots
from cpkit.kernels.swa_indices import WindowTokens, draft_swa_indices, swa_indices
from cpkit.kernels.table_keys import KeyTable, pack_table_keys, pull_table_keys, table_keys
from cpkit.kernels.tail_slots import tail_slots
from cpkit.kernels.tile_schedule import tile_schedule
from cpkit.kernels.token_to_req import BatchRows, token_to_req
from cpkit.kernels.topk import topk
from cpkit.kernels.warmup import warm_up
from cpkit.topology import Shard

border.JITFunction = ()  # it refuses compiled kernels on a machine without a GPU
backend, keys, binders = make_backend(GPUTarget("cuda", 90, 32)), set(), {}


def record(kernel, *args, grid, warmup, **kwargs):
    """In the place of a launch: the key that Triton would look up."""
    if kernel not in binders:
        binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialization, options = binders[kernel](*args, **kwargs)
    keys.add(repr((kernel.__name__, specialization, sorted(options.items()))))


JITFunction.run = record


def tensor(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def long(size):
    return tensor(size, dtype=torch.int64)


def steps(d, rank, states):
    """Every launch of a rank, at sizes from one token to beyond 2^31, aligned and not."""
    dcp_rank = rank % d.dcp_size
    for num_tokens in (1, 16, 17, 2**31 + 1):
        for num_rows in (1, 16):
            for offset in (0, 1):
                slots_and_lens(d, dcp_rank, states, num_tokens, num_rows, offset)
                rows_over_tokens(d, dcp_rank, states, num_tokens, num_rows, offset)
        caches_and_gathers(d, dcp_rank, min(num_tokens, 2**26))
        if d.index_heads:
            for num_keys, offset in ((1, 0), (17, 1), (2**20, 0), (2**20, 1)):
                scores(d, dcp_rank, min(num_tokens, 2**24), num_keys, offset)


def caches_and_gathers(d, dcp_rank, num_keys):
    b, dtypes = {"backend": "triton"}, {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    slots = long(num_keys + 1)
    for apart in (0, 8, 12):  # bytes between pages: whole units of 16, of 8, of 4
        for main, side in (*d.key_rows, *([(d.index_dim, 4)] if d.index_dim else [])):
            cache = tensor(num_keys, 16 * (main + side) + apart, dtype=torch.uint8)
            rows, sizes = tensor(num_keys, main + side, dtype=torch.uint8), {"block_size": 16, "side_bytes": side}
            write_rows(cache, rows, slots[1:], **sizes, **b)
            read_rows(cache, slots[1:], **sizes, main_bytes=main, **b)
        if not d.index_dim:
            continue
        cache = tensor(num_keys, 16 * (d.index_dim + 4) + apart, dtype=torch.uint8)
        gather_index_keys(cache, slots, block_size=16, dim=d.index_dim, **b)
        for dtype in d.index_dtypes:
            for wide in (0, 1):  # keys side by side, or parts of wider rows
                keys = tensor(num_keys, d.index_dim + wide, dtype=dtypes[dtype])[:, : d.index_dim]
                quantize_index_keys(cache, keys, slots[1:], block_size=16, pow2_scales=d.pow2_scales, **b)
                quantize_fp8(keys, group_size=d.index_dim, pow2_scales=d.pow2_scales, **b)
        for num_rows in (1, 17):
            table = KeyTable(tensor(num_rows + 1), tensor(num_rows, 48), tensor(num_rows), num_keys, 16, apart)
            table_keys(cache, table, d.index_dim, **b)
            if d.pcp_size > 1 and d.dcp_size > 1:
                gathers(d, dcp_rank, cache, table)


def scores(d, dcp_rank, num_tokens, num_keys, offset):
    fp8, b, heads, k = torch.float8_e4m3fn, {"backend": "triton"}, d.index_heads, d.index_topk
    q, weights = tensor(num_tokens, heads, 128, dtype=fp8), tensor(num_tokens, heads + 4 * offset, dtype=torch.float32)
    keys, scales = tensor(num_keys, 128, dtype=fp8), tensor(num_keys + 1, dtype=torch.float32)[offset:][:num_keys]
    ends = tensor(num_tokens + 1)[offset:][:num_tokens]
    operands, logits = (q, (keys, scales), weights[:, :heads], ends, ends), tensor(num_tokens, num_keys + offset)
    logits = logits.to(torch.float32)[:, offset:]
    mqa_logits(*operands, out=logits, **b)
    if gpu == ["hopper"]:
        select_listed(Operands(*operands), (tensor(num_tokens, k), tensor(num_tokens, k)), 2**60)
    if d.pcp_size > 1 and d.dcp_size > 1 and not d.symmetric:
        for held in (1, num_keys):
            packed = tensor(d.dcp_size, packed_bytes(held, 128), dtype=torch.uint8)
            shards = KeyShards(packed, tensor(num_tokens + 2)[offset:], 128, d.interleave)
            if not reads_shards(shards):
                continue
            of_shards = q, shards, weights[:, :heads], ends, ends
            mqa_logits(*of_shards, **b)
            if gpu == ["hopper"]:
                select_listed(Operands(*of_shards), (tensor(num_tokens, k), tensor(0)), 2**60)
    kept = topk(logits, ends, ends, k, **b)
    for ratio in {1, *(ratio for ratio, _ in d.states)}:
        order = KeyOrder(d.dcp_size, dcp_rank, max(d.interleave // ratio, 1), offset)
        packed_candidates(kept, logits, ends, order, **b)
        prefills = token_order(offset) if d.pcp_size > 1 and d.dcp_size > 1 else order
        packed_scores(kept, tensor(num_tokens, k, dtype=torch.float32), prefills, **b)
    join_packed(tensor(2 * num_tokens, k, 12, dtype=torch.uint8), 2, k, **b)
    if d.dcp_size > 1:
        best_of_packed(tensor(d.dcp_size * num_tokens, k, 12, dtype=torch.uint8), d.dcp_size, k, **b)
    for query_tokens in range(1, d.query_tokens + 1):
        rows, width = min(num_tokens, 1000), (num_keys + 63) // 64
        some = rows * query_tokens
        for apart in (0, 128) if gpu == ["hopper"] else (0, 4, 8):  # bytes between pages
            paged_mqa_logits(
                tensor(rows, query_tokens, heads, 128, dtype=fp8),
                tensor(num_keys, 8448 + apart, dtype=torch.uint8),
                tensor(some, heads, dtype=torch.float32),
                tensor(rows, query_tokens),
                tensor(rows, width + offset)[:, offset:],
                max_keys=num_keys,
                schedule=tensor(133, 2),
                out=tensor(some, num_keys + offset, dtype=torch.float32)[:, offset:],
                **b,
            )


def gathers(d, dcp_rank, cache, table):
    peers, place = long(d.dcp_size), {"interleave": d.interleave}
    if d.symmetric:
        meet(peers, tensor(d.dcp_size), tensor(2), place=dcp_rank, timeout_s=1 + dcp_rank)
        pull_table_keys(peers, cache, table, d.index_dim, **place)
        values = tensor(table.num_keys * d.dcp_size, d.index_dim, dtype=torch.float8_e4m3fn)
        out = values, tensor(len(values), dtype=torch.float32)
        pull_keys(peers, table.local_start, table.num_keys, d.index_dim, out=out, **place)
        return
    pack_table_keys(cache, table, empty_shard(dcp_rank, table.num_keys, d.index_dim, cache.device), backend="triton")
    for keys in (1, 16, table.num_keys + 100, 2**31 // d.dcp_size - 100):
        packed = tensor(d.dcp_size, packed_bytes(keys, d.index_dim), dtype=torch.uint8)
        shards = KeyShards(packed, table.local_start, d.index_dim, d.interleave)
        gather_keys(shards, backend="triton")
        if shards.is_aligned:
            pick_keys(shards, table.local_start, backend="triton")


def slots_and_lens(d, dcp_rank, states, num_tokens, num_rows, offset):
    shard = Shard(dcp_size=d.dcp_size, dcp_rank=dcp_rank, interleave=d.interleave)
    loc, lens, table = tensor(num_rows + 2)[offset:][: num_rows + 1], tensor(num_rows), tensor(num_rows, 48 + offset)
    table = table[:, offset:]
    slots, out = long(num_tokens + 1)[offset:][:num_tokens], long(num_tokens)
    b = {"backend": "triton"}
    token_to_req(loc, num_mapped=num_tokens, out=tensor(num_tokens), **b)
    for ratio, per_block in states:
        blocks = StateBlocks(table, ratio, per_block)
        for rows in (BatchRows(loc, lens), BatchRows(loc, lens, lens)):
            if d.pcp_size > 1 and d.dcp_size > 1:
                writes = tensor(num_tokens, dtype=torch.bool)
                packed_compressed_slots(writes, rows, blocks, shard, out=out, **b)
                unpack_compressed_slots(slots, shard, out=out, **b)
            else:
                compressed_slots(slots, rows, blocks, shard, out=out, **b)
    for kind in (None, *states):
        for kpool in {0, d.kpool}:
            for writes in (None, tensor(num_tokens, dtype=torch.bool)):
                rows = BatchRows(loc, lens, lens if kpool else None)
                wanted = StateSlots(StateBlocks(table, *kind), slots) if kind else None
                tail = TailSlots(table, slots, kpool) if kpool else None
                step_slots(rows, TokenSlots(table, out, d.block_size, shard), wanted, tail, writes_kv=writes, **b)
    for window in (1, 16, 127):
        gather_lens(loc, lens, window_size=window, replay_start=lens if offset else None, out=tensor(num_rows), **b)
    if d.kpool:
        tail_slots(slots, out, loc, table, kpool=d.kpool, num_tokens=num_tokens, out=long(num_tokens), **b)
    for ratio in {1, *(ratio for ratio, _ in states)}:
        place = {"dcp_size": d.dcp_size, "interleave": max(d.interleave // ratio, 1)}
        for dtype in (torch.int32, torch.int64):
            local = tensor(num_rows, 4 + offset, dtype=dtype)[:, offset:]
            dcp_local_lens(local, **place, dcp_rank=dcp_rank, out=tensor(num_rows, 4, dtype=dtype), **b)
        if d.pcp_size > 1 and d.dcp_size > 1:
            deinterleave_idx(long(num_rows + 1), **place, out=long(8 * num_tokens), **b)


def rows_over_tokens(d, dcp_rank, states, num_tokens, num_rows, offset):
    num_tokens = min(num_tokens, 2**31 - 1)
    place = {"dcp_size": d.dcp_size, "dcp_rank": dcp_rank, "interleave": d.interleave}
    lens, loc, table = tensor(num_rows), tensor(num_rows + 1), tensor(num_rows, 48 + offset)[:, offset:]
    some = {"compress_ratio": 1, "out": None, "backend": "triton"}
    for ratio in {1, *(ratio for ratio, _ in states)}:
        some["compress_ratio"] = ratio
        chunk = ChunkRows(loc, lens, long(num_rows), loc, lens if offset else None)
        some["out"] = KeyRanges(tensor(num_tokens), tensor(num_tokens), tensor(16 + offset))
        if d.pcp_size > 1 and d.dcp_size > 1:
            key_ranges_gathered(chunk, token_start=offset, **some)
        else:
            key_ranges_local(chunk, token_start=offset, **place, **some)
        for decodes, width in ((flat_decodes, 1), (native_decodes, 2)):
            some["out"] = DecodeRows(tensor(num_rows, width), lens, lens, lens, tensor(num_rows, 48))
            decodes(loc, lens, table, Shard(**place), **some)
    for draft in [False] * (d.swa_block_size > 0) + [True] * d.draft_blocks:
        valid = tensor(16 + offset, dtype=torch.bool)
        extra = [None if draft or not offset else lens] * 2
        tokens = WindowTokens(loc, lens, tensor(16 + offset), valid, table, d.swa_block_size, *extra)
        window = {"window_size": 1 + 15 * offset, "token_offset": offset, "backend": "triton"}
        (draft_swa_indices if draft else swa_indices)(tokens, indices=tensor(16, 128), lens=tensor(16), **window)
    for req in (None, lens):
        tile_schedule(lens, tile=16 + offset, req=req, out=tensor(133, 2), backend="triton")
    for ratio, block in ((1, d.block_size), *states):
        shard = Shard(dcp_size=d.dcp_size, dcp_rank=dcp_rank, interleave=max(d.interleave // ratio, 1))
        blocks = KeyBlocks(table, block, 2**31 + offset, lens if offset else None)
        for dtype in (torch.int32, torch.int64):
            positions, out = tensor(num_rows, 17, dtype=dtype)[:, offset:], tensor(num_rows, 17 - offset, dtype=dtype)
            shard_slots(positions, lens, blocks, shard, out=out, backend="triton")
            compact_shard_slots(positions, lens, blocks, shard, out=out, counts=lens, backend="triton")
            compact_slots(positions, out=out, counts=lens, backend="triton")
            if d.pcp_size > 1 and d.dcp_size > 1:
                start = tensor(num_rows, dtype=dtype)
                gathered_slots(positions, start, shard, rank_stride=16 + offset, out=out, backend="triton")


def compare(states, on="other", **sizes):
    """Keys that ranks launch and warm_up does not list, those that no rank launches, and how often topk.cu is built."""
    gpu[:] = [on]
    states = tuple(map(tuple, states))
    sizes = {**sizes, "key_rows": tuple(map(tuple, sizes.get("key_rows", [])))}
    d = KernelSizes(**sizes, states=states)
    keys.clear()
    built.clear()
    warm_up(d, torch.device("meta"))
    warm, missed, num_built = set(keys), set(), len(built)
    ranks = range(max(d.pcp_size, d.dcp_size))
    for rank in ranks if len(ranks) < 5 else (0, ranks[-1]):
        keys.clear()
        steps(d, rank, states)
        missed |= keys - warm
    never = warm - keys
    keys.clear()
    steps(d, 0, ((16, 4),))
    found = {"missed": sorted(missed), "never_launched": sorted(never), "found_when_unlisted": bool(keys - warm)}
    return {**found, "built": num_built}


if __name__ == "__main__":
    print(json.dumps({name: compare(**sizes) for name, sizes in json.loads(sys.argv[1]).items()}))
