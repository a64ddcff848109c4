"""A paged pool of KV blocks: who holds which, which are free, which are free but still worth keeping.

    never handed out   0, the null block: padding of block tables
    held               refs >= 1, in that many requests' tables
    cached             refs = 0, content still findable: oldest first, taken only when no plain free block is left
    free               refs = 0, nothing worth keeping

A block id stands for one block on every rank that shards keys, so it spans block_size * dcp tokens.
"""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from cpkit.arrays import BoolArray, Int32Array
from cpkit.errors import ConfigError
from cpkit.planner.slots import NULL_BLOCK


class BlockAllocator:
    """Hands out blocks 1..num_blocks - 1 by reference count; every operation costs O(blocks named in it).

    on_evict(blocks) is told when cached blocks are taken for new content. Misuse (more blocks than are free, a free
    without a hold) is a RuntimeError: a scheduler asks for num_free first.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[list[int]], None] = lambda blocks: None) -> None:
        if not 2 <= num_blocks < 1 << 31:
            raise ConfigError(
                f"num_kv_blocks={num_blocks}: a pool has from 2 blocks (block 0 is the null block) to 2^31 - 1"
            )
        self.num_blocks = num_blocks
        self.refs: Int32Array = np.zeros(num_blocks, np.int32)
        self._on_evict = on_evict
        self._free: Int32Array = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)  # a stack; low ids come off first
        self._num_plain = num_blocks - 1
        self._keep: BoolArray = np.zeros(num_blocks, np.bool_)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._place: Int32Array = np.zeros(num_blocks, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return self._num_plain + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks in some request's table."""
        return self.num_blocks - 1 - self.num_free

    def num_idle(self, blocks: list[int]) -> int:
        """How many of these blocks nobody holds: sharing them takes as many from num_free."""
        return sum(block in self._cached for block in blocks)

    def allocate(self, count: int) -> Int32Array:
        """[count] int32 blocks, each held once; free ones first, then cached ones, least recently used first."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks - 1} are free")
        blocks = np.empty(count, np.int32)
        plain = min(count, self._num_plain)
        self._num_plain -= plain
        blocks[:plain] = self._free[self._num_plain : self._num_plain + plain][::-1]
        if plain < count:
            evicted = [self._cached.popitem(last=False)[0] for _ in range(count - plain)]
            self._on_evict(evicted)
            blocks[plain:] = evicted
            self._keep[blocks[plain:]] = False
        self.refs[blocks] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Hold blocks with findable content once more."""
        if not self._keep[blocks].all() or len(set(blocks)) != len(blocks):
            raise RuntimeError(f"blocks {blocks[:8]} hold no content to share, or are named twice")
        self.refs[blocks] += 1
        for block in blocks:
            self._cached.pop(block, None)

    def keep(self, blocks: list[int]) -> None:
        """From here on the blocks' content is findable: freed, they wait as cached."""
        if (self.refs[blocks] < 1).any():
            raise RuntimeError(f"blocks {blocks[:8]}: what nobody holds has no content to keep")
        self._keep[blocks] = True

    def free(self, blocks: Int32Array) -> None:
        """Let go of one hold on each block of a request, in the order of its table.

        The last blocks count as least recently used: a prefix is of use without its tail, not the other way round.
        """
        if len(blocks) == 0:
            return
        held = self.refs[blocks]
        place = np.arange(len(blocks), dtype=np.int32)
        self._place[blocks] = place  # of a block named twice only the last place stays
        if held.min() < 1 or (self._place[blocks] != place).any():
            wrong = [int(b) for b in blocks if self.refs[b] < 1 or np.count_nonzero(blocks == b) > 1]
            raise RuntimeError(f"double free of blocks {wrong[:8]}: nobody holds them, or they are named twice")
        self.refs[blocks] = held - 1
        idle = blocks[held == 1][::-1]
        keep = self._keep[idle]
        self._cached.update(dict.fromkeys(idle[keep].tolist()))
        plain = idle[~keep]
        self._free[self._num_plain : self._num_plain + len(plain)] = plain
        self._num_plain += len(plain)

    def check(self) -> None:
        """Every block is in exactly one place, and the null block in none; AssertionError otherwise."""
        places = np.zeros(self.num_blocks, np.int64)
        np.add.at(places, self._free[: self._num_plain], 1)
        np.add.at(places, np.fromiter(self._cached, np.int64, len(self._cached)), 1)
        places[self.refs > 0] += 1
        assert self.refs[NULL_BLOCK] == 0 and places[NULL_BLOCK] == 0, "the null block was handed out"
        assert (self.refs >= 0).all(), f"negative holds on blocks {np.flatnonzero(self.refs < 0)[:8]}"
        wrong = np.flatnonzero(places[1:] != 1)[:8] + 1
        assert wrong.size == 0, f"blocks {wrong} are in {places[wrong]} places"
        assert self._keep[list(self._cached)].all(), "a cached block has no content to keep"
