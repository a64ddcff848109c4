"""Which leading KV blocks of a prompt an earlier request has left behind.

A trace names a prompt's leading runs of H tokens; the cache holds virtual blocks of V = block_size * dcp tokens. A
virtual block is what all tokens up to its end make it, so its key is the chain of hashes that covers it:

    H=4, V=6      hashes          a a a a|b b b b|c c c c|d d         14 tokens
                  virtual blocks  0 0 0 0 0 0|1 1 1 1 1 1|- -
                  chains          a b        |a b c      |            the last 2 tokens fill no virtual block

    H=8, V=4      virtual blocks 0 and 1 have the same chain a: their own place in the prompt tells them apart
"""

import numpy as np
import numpy.typing as npt

from cpkit.arrays import Int32Array
from cpkit.workload.blocks import BlockAllocator
from cpkit.workload.request import Request

UInt64Array = npt.NDArray[np.uint64]


class PrefixCache:
    """Finds a prompt's longest kept prefix, and keeps computed prompt blocks; evicts least recently used.

    Keys are 64-bit fingerprints of chains: among a million different blocks two meet with odds of 3 in 10^8.
    Generated tokens have no hashes in a trace, so only prompt blocks are kept.
    """

    def __init__(self, num_blocks: int, virtual_block: int) -> None:
        self.virtual_block = virtual_block
        self.allocator = BlockAllocator(num_blocks, self._forget)
        self._block_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}

    def __len__(self) -> int:
        """Virtual blocks that can be found."""
        return len(self._block_of)

    def find(self, keys: list[int], num_tokens: int) -> list[int]:
        """Blocks of the longest kept prefix, for a request that must compute num_tokens.

        The hit is capped at num_tokens - 1, since the last token has to be computed for its output, and then rounded
        down to whole virtual blocks. virtual_block=32, 150 common tokens: 4 blocks, 128 tokens.
        """
        found: list[int] = []
        for key in keys[: max(num_tokens - 1, 0) // self.virtual_block]:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def keep(self, keys: list[int], blocks: Int32Array) -> None:
        """Make computed blocks findable; where an equal block already is, that one stays and this one is not kept."""
        new = {key: block for key, block in zip(keys, blocks.tolist(), strict=True) if key not in self._block_of}
        if new:
            self.allocator.keep(list(new.values()))
            self._block_of.update(new)
            self._key_of.update(zip(new.values(), new, strict=True))

    def _forget(self, blocks: list[int]) -> None:
        for block in blocks:
            del self._block_of[self._key_of.pop(block)]

    def check(self) -> None:
        """Keys and blocks name each other, and the pool is sound; AssertionError otherwise."""
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        self.allocator.check()


def block_keys(request: Request, virtual_block: int) -> list[int]:
    """Keys of the prompt's whole virtual blocks that hashes cover to their end, first to last."""
    hashes, size = request.block_hashes, request.hash_block_size
    covered = min(len(hashes) * size, request.prompt_len)
    place = np.arange(covered // virtual_block, dtype=np.int64)
    if place.size == 0:
        return []
    last_hash = ((place + 1) * virtual_block - 1) // size
    keys: list[int] = _mix(chain_fingerprints(hashes)[last_hash] + place.astype(np.uint64)).tolist()
    return keys


def chain_fingerprints(hashes: Int32Array) -> UInt64Array:
    """[n] uint64: for each hash a fingerprint of it and all before it, equal only for equal chains (but for chance).

    A sum over (place, name) pairs, each mixed to 64 random-looking bits, so that all prefixes cost one cumsum.
    """
    pairs = (np.arange(len(hashes), dtype=np.uint64) << np.uint64(32)) | hashes.astype(np.uint64)
    return np.cumsum(_mix(pairs), dtype=np.uint64)


def _mix(x: UInt64Array) -> UInt64Array:
    """A bijection of 64-bit words in which every input bit stirs every output bit (the finaliser of splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
