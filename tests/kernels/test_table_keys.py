"""Keys of paged caches made contiguous through block tables, against keys put one by one where their slots say."""

import itertools
import random

import pytest
import torch

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.key_shards import PackedShard, empty_shard, packed_bytes
from cpkit.kernels.table_keys import KeyTable, pack_table_keys, pull_table_keys, table_keys
from tests import oracles
from tests.kernels.gathered import lay_out
from tests.kernels.pages import GARBAGE, fp32_bytes, page_cache, put

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM = 8


def i32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts(lens):
    return i32([0, *itertools.accumulate(lens)])


def name_of(row, key):
    """Bytes and scale of one key of one request; no byte is 255."""
    number = 1 + row * 500 + key
    return [number % 251, number // 251, *([number % 7] * (DIM - 2))], float(number)


def tables_of(lens, block_size, rng):
    """A table of distinct blocks for each row, one block longer than its keys need."""
    width = max(max(lens) - 1, 0) // block_size + 2
    blocks = rng.sample(range(width * len(lens)), width * len(lens))
    return [blocks[i * width : (i + 1) * width] for i in range(len(lens))]


def filled(tables, held, block_size, gap):
    """A cache with key `held[row][i]` of each row at the i-th place of its blocks, all else garbage."""
    num_blocks, page = 1 + max(map(max, tables)), block_size * (DIM + 4)
    cache = page_cache(num_blocks, page, page + gap)
    for row, keys in enumerate(held):
        for index, key in enumerate(keys):
            values, scale = name_of(row, key)
            put(cache, oracles.block_slot(tables[row], index, block_size), block_size, values, fp32_bytes(scale))
    return cache.to(DEVICE)


def rows_of(keys):
    return list(zip(keys[0].view(torch.uint8).tolist(), keys[1].tolist(), strict=True))


NOTHING = ([0] * DIM, 0.0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("block_size", "gap"), [(1, 0), (3, 4), (4, 16), (64, 0)])
@pytest.mark.parametrize(
    ("lens", "extents", "first_key"),
    [
        pytest.param([3, 2], [3, 2], 0, id="drawn"),
        pytest.param([0, 5, 0], [0, 7, 0], 0, id="padded-to-a-larger-shard-between-empty-rows"),
        pytest.param([63, 64, 65], [64, 64, 65], 0, id="b89-a-program-spans-many-pages"),
        pytest.param([9], [5], 4, id="later-key-span"),
        pytest.param([9], [7], 4, id="later-key-span-with-padding"),
        pytest.param([0], [0], 0, id="no-keys"),
    ],
)
def test_keys_come_row_after_row(lens, extents, first_key, block_size, gap, backend):
    tables = tables_of(lens, block_size, random.Random(1))
    cache = filled(tables, [range(n) for n in lens], block_size, gap)
    held = [n - first_key if n else 0 for n in lens]
    table = KeyTable(starts(extents), i32(tables), i32(held), sum(extents), block_size, first_key)
    want = [
        name_of(row, first_key + at) if at < held[row] else NOTHING
        for row, extent in enumerate(extents)
        for at in range(extent)
    ]
    assert rows_of(table_keys(cache, table, DIM, backend=backend)) == want


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("num_keys", [1, 4, 5])
def test_shards_of_all_ranks_make_one_layout(num_keys, rank, backend):
    """The shard of each rank, as bytes of a layout made key by key; DIM is two words, so odd shards are shifted."""
    tables = tables_of([num_keys], 2, random.Random(2))
    cache = filled(tables, [range(num_keys)], 2, 0)
    whole = lay_out([[name_of(0, key) for key in range(num_keys)]] * 4, DIM)
    size = packed_bytes(num_keys, DIM)
    table = KeyTable(starts([num_keys]), i32(tables), i32([num_keys]), num_keys, 2)
    shard = empty_shard(rank, num_keys, DIM, cache.device)
    room = torch.full((128 + size + 64,), GARBAGE, dtype=torch.uint8, device=DEVICE)
    first = 16 - shard.num_front * 4
    shard = PackedShard(room[first : first + size], shard.num_front, DIM)
    pack_table_keys(cache, table, shard, backend=backend)
    assert shard.packed.tolist() == whole[rank * size : (rank + 1) * size]
    assert (room[:first] == GARBAGE).all() and (room[first + size :] == GARBAGE).all()


def test_a_shard_for_another_number_of_keys_is_refused():
    cache = filled([[0, 1]], [range(3)], 2, 0)
    table = KeyTable(starts([3]), i32([[0, 1]]), i32([3]), 3, 2)
    with pytest.raises(PlanError, match="3 keys for a shard of 2"):
        pack_table_keys(cache, table, empty_shard(0, 2, DIM, cache.device))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_does_not_exist_reads_nothing(backend):
    """Blocks outside the cache, lengths beyond the table, and a table whose rows lie apart."""
    cache = filled([[0, 1, 2]], [range(6)], 2, 0)
    wide = i32([[1, 2**31 - 1, 99, 99], [-1, 0, 99, 99]])
    table = KeyTable(starts([8, 4]), wide[:, :2], i32([2**31 - 1, 3]), 12, 2)
    want = [name_of(0, 2), name_of(0, 3), *[NOTHING] * 6, NOTHING, NOTHING, name_of(0, 0), NOTHING]
    assert rows_of(table_keys(cache, table, DIM, backend=backend)) == want
    nothing = KeyTable(starts([2]), i32([[]]).view(1, 0), i32([2]), 2, 2)
    assert rows_of(table_keys(cache, nothing, DIM, backend=backend)) == [NOTHING] * 2


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize(
    ("dcp_size", "interleave", "lens"),
    [
        pytest.param(1, 1, [5], id="one-rank"),
        pytest.param(2, 1, [3, 1], id="drawn"),
        pytest.param(2, 4, [3, 0, 9, 1], id="empty-row-and-shorter-than-a-turn"),
        pytest.param(3, 2, [31, 0, 2], id="odd"),
    ],
)
def test_caches_of_all_ranks_give_token_order(dcp_size, interleave, lens, block_size):
    hands = [oracles.deal(n, dcp_size, interleave) for n in lens]
    shards = [max(map(len, held)) for held in hands]
    tables = tables_of(shards, block_size, random.Random(3))
    caches = [filled(tables, [held[rank] for held in hands], block_size, 0) for rank in range(dcp_size)]
    num_blocks = min(map(len, caches))
    caches = [cache[:num_blocks] for cache in caches]
    peers = torch.tensor([cache.data_ptr() for cache in caches], device=DEVICE)
    table = KeyTable(starts(shards), i32(tables), i32(lens), sum(shards), block_size)
    found = rows_of(pull_table_keys(peers, caches[0], table, DIM, interleave=interleave))
    want = [
        name_of(row, at) if at < length else NOTHING
        for row, (length, shard) in enumerate(zip(lens, shards, strict=True))
        for at in range(shard * dcp_size)
    ]
    assert found == want


@pytest.mark.skipif(DEVICE == "cuda", reason="memory of a GPU is real, touched or not")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_pages_past_2_31_bytes(backend):
    """Memory that is never touched costs nothing."""
    stride, page = 1_077_120, 1994
    memory = torch.empty((page + 1) * stride, dtype=torch.uint8)
    cache = torch.as_strided(memory, (page + 1, 2 * (DIM + 4)), (stride, 1))
    for key in range(2):
        values, scale = name_of(0, key)
        put(cache, 2 * page + key, 2, values, fp32_bytes(scale))
    table = KeyTable(starts([2]), i32([[page]]), i32([2]), 2, 2)
    assert rows_of(table_keys(cache, table, DIM, backend=backend)) == [name_of(0, 0), name_of(0, 1)]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"backend": "cuda"}, ConfigError, "built for torch, triton", id="no-such-backend"),
        pytest.param({"dim": 12}, PlanError, "at least 32 bytes", id="page-too-small"),
        pytest.param({"dim": 6}, PlanError, "multiple of 4", id="no-whole-words"),
        pytest.param(
            {"table": {"key_lens": torch.tensor([3], device=DEVICE)}}, PlanError, "key_lens is int64", id="int64-lens"
        ),
        pytest.param({"table": {"num_keys": -1}}, PlanError, "num_keys=-1", id="negative"),
        pytest.param({"table": {"block_size": 0}}, PlanError, "block_size=0", id="no-block"),
        pytest.param(
            {"cache": torch.zeros(65, dtype=torch.uint8, device=DEVICE)[1:49].view(2, 24), "backend": "triton"},
            PlanError,
            "starts at byte 1 of 16",
            id="not-aligned",
        ),
    ],
)
def test_refusals(change, error, words):
    parts = {
        "local_start": torch.tensor([0, 3], dtype=torch.int32, device=DEVICE),
        "block_tables": torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE),
        "key_lens": torch.tensor([3], dtype=torch.int32, device=DEVICE),
        "num_keys": 3,
        "block_size": 2,
    } | change.get("table", {})
    cache = change.get("cache", torch.zeros(2, 24, dtype=torch.uint8))
    with pytest.raises(error, match=words):
        table_keys(cache, KeyTable(**parts), change.get("dim", 8), backend=change.get("backend", "torch"))
