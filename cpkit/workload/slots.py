"""State of the running requests, one array an attribute, one slot a request.

slot       0      1      2      3            order  [2, 0, 3]   slots in use, first admitted first
req        17     -      12     18
computed   640    -      6757   0
tables     5 6 0  0 0 0  9 2 7  8 0 0        row s: the block ids of slot s, then null blocks
"""

import numpy as np

from cpkit.arrays import Int32Array, IntArray, spread
from cpkit.workload.blocks import NULL_BLOCK


class Slots:
    """Running requests as arrays, so that a step of many decodes costs a few array operations.

    req, prefill_len, num_computed, output_left, num_blocks: [num_slots] int64; prefill_len counts what is computed
        before the next output token: the prompt, and after a preemption also the outputs it already gave.
    tables: [num_slots, max_blocks] int32.
    order: [num_running] int64, slots in use, first admitted first.
    """

    def __init__(self, num_slots: int, max_blocks: int, virtual_block: int) -> None:
        self.virtual_block = virtual_block
        self.req = np.full(num_slots, -1, np.int64)
        self.prefill_len = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.output_left = np.zeros(num_slots, np.int64)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.tables: Int32Array = np.zeros((num_slots, max_blocks), np.int32)  # untouched pages cost no memory
        self.order: IntArray = np.zeros(0, np.int64)
        self._unused = list(range(num_slots - 1, -1, -1))

    @property
    def has_room(self) -> bool:
        """One more request could run."""
        return bool(self._unused)

    def add(self, req: int, prefill_len: int, output_left: int) -> int:
        """Put a request behind all others; returns its slot, which has no blocks yet."""
        slot = self._unused.pop()
        self.req[slot] = req
        self.prefill_len[slot] = prefill_len
        self.output_left[slot] = output_left
        self.num_computed[slot] = 0
        self.order = np.append(self.order, slot)
        return slot

    def remove(self, slots: IntArray) -> None:
        """Empty slots; the requests' blocks are the caller's to free first (blocks_of)."""
        self.req[slots] = -1
        self.order = self.order[self.req[self.order] >= 0]
        for slot in slots.tolist():
            self.tables[slot, : self.num_blocks[slot]] = NULL_BLOCK
            self._unused.append(slot)
        self.num_blocks[slots] = 0

    def blocks_of(self, slot: int) -> Int32Array:
        """[num_blocks] int32, the block ids of a slot, in the order of its tokens."""
        return self.tables[slot, : self.num_blocks[slot]].copy()

    def missing_blocks(self, slots: IntArray, seq_lens: IntArray) -> IntArray:
        """[len(slots)] int64, blocks that each slot lacks to hold that many tokens."""
        missing: IntArray = (seq_lens + (self.virtual_block - 1)) // self.virtual_block - self.num_blocks[slots]
        return missing.clip(min=0)

    def append_blocks(self, slots: IntArray, counts: IntArray, blocks: Int32Array) -> None:
        """Give each slot its count of the blocks, in order."""
        self.tables[np.repeat(slots, counts), spread(counts, self.num_blocks[slots])] = blocks
        self.num_blocks[slots] += counts
