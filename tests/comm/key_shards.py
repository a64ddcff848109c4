"""Shards of index keys, each key telling which it is: what a gather starts from, and what it must end in."""

import itertools
import random

import torch

from cpkit.kernels.gather_keys import ordered_keys
from cpkit.kernels.index_cache import insert_index_keys
from cpkit.kernels.table_keys import KeyTable
from tests import oracles

DIM, BLOCK = 128, 16
STEPS = [[[70], [5, 0, 33], [1, 1], [0], [64, 200]], [[0], [0]], [[17]]]
"""Lengths of the requests of each workspace of each step."""


def key_bytes(request, position):
    """A key that tells which it is."""
    generator = torch.Generator().manual_seed(request * 100_003 + position)
    values = torch.randint(0, 120, (DIM,), generator=generator, dtype=torch.uint8)
    return values, float(request * 1000 + position + 1)


def workspace(comm, lens, interleave, seed):
    """This rank's cache and tables of requests of some lengths, and the keys in token order with padding's places."""
    place, size = comm.group("dcp").place, comm.group("dcp").size
    rng = random.Random(seed)
    shards = [max(len(hand) for hand in oracles.deal(length, size, interleave)) for length in lens]
    width = max(max(shards), 1) // BLOCK + 1
    blocks = rng.sample(range(1, 1 + width * len(lens)), width * len(lens))
    tables = [blocks[i * width : (i + 1) * width] for i in range(len(lens))]
    cache = torch.full((len(blocks) + 1, BLOCK * (DIM + 4)), 255, dtype=torch.uint8, device=comm.device)
    values, scales, slots, held = [], [], [], []
    for request, length in enumerate(lens):
        hand = oracles.deal(length, size, interleave)[place]
        held.append(len(hand))
        for index, position in enumerate(hand):
            value, scale = key_bytes(request, position)
            values.append(value)
            scales.append(scale)
            slots.append(oracles.block_slot(tables[request], index, BLOCK))
    if slots:
        insert_index_keys(
            cache,
            torch.stack(values).view(torch.float8_e4m3fn).to(comm.device),
            torch.tensor(scales, device=comm.device),
            torch.tensor(slots, device=comm.device),
            block_size=BLOCK,
        )
    start = torch.tensor([0, *itertools.accumulate(shards)], dtype=torch.int32, device=comm.device)
    table = KeyTable(
        start,
        torch.tensor(tables, dtype=torch.int32, device=comm.device),
        torch.tensor(held, dtype=torch.int32, device=comm.device),
        sum(shards),
        BLOCK,
    )
    return cache, table, [shard * size for shard in shards]


def check_keys(keys, lens, extents, where):
    """keys: in token order, or shards to be put into it."""
    keys = ordered_keys(keys)
    values, scales = keys[0].view(torch.uint8).cpu(), keys[1].cpu()
    at = 0
    for request, (length, extent) in enumerate(zip(lens, extents, strict=True)):
        for position in range(length):
            value, scale = key_bytes(request, position)
            assert torch.equal(values[at + position], value), (where, request, position)
            assert scales[at + position] == scale, (where, request, position)
        at += extent
    assert len(values) == at
