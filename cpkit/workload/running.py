"""State of the running requests, one array an attribute, one seat a request (a slot is a row of the KV cache).

seat       0      1      2      3            order  [2, 0, 3]   seats in use, first admitted first
req        17     -      12     18
computed   640    -      6757   0
tables     5 6 0  0 0 0  9 2 7  8 0 0        row s: the block ids of seat s, then null blocks
"""

import numpy as np

from cpkit.arrays import Int32Array, IntArray, spread
from cpkit.planner.slots import NULL_BLOCK


class Running:
    """Running requests as arrays, so that a step of many decodes costs a few array operations.

    req, prefill_len, num_computed, output_left, num_blocks: [num_seats] int64; prefill_len counts what is computed
        before the next output token: the prompt, and after a preemption also the outputs it already gave.
    tables: [num_seats, max_blocks] int32.
    order: [num_running] int64, seats in use, first admitted first.
    """

    def __init__(self, num_seats: int, max_blocks: int, virtual_block: int) -> None:
        self.virtual_block = virtual_block
        self.req = np.full(num_seats, -1, np.int64)
        self.prefill_len = np.zeros(num_seats, np.int64)
        self.num_computed = np.zeros(num_seats, np.int64)
        self.output_left = np.zeros(num_seats, np.int64)
        self.num_blocks = np.zeros(num_seats, np.int64)
        self.tables: Int32Array = np.zeros((num_seats, max_blocks), np.int32)  # untouched pages cost no memory
        self.order: IntArray = np.zeros(0, np.int64)
        self._unused = list(range(num_seats - 1, -1, -1))

    @property
    def has_room(self) -> bool:
        """One more request could run."""
        return bool(self._unused)

    def add(self, req: int, prefill_len: int, output_left: int) -> int:
        """Put a request behind all others; returns its seat, which has no blocks yet."""
        seat = self._unused.pop()
        self.req[seat] = req
        self.prefill_len[seat] = prefill_len
        self.output_left[seat] = output_left
        self.num_computed[seat] = 0
        self.order = np.append(self.order, seat)
        return seat

    def remove(self, seats: IntArray) -> None:
        """Empty seats; the requests' blocks are the caller's to free first (blocks_of)."""
        self.req[seats] = -1
        self.order = self.order[self.req[self.order] >= 0]
        for seat in seats.tolist():
            self.tables[seat, : self.num_blocks[seat]] = NULL_BLOCK
            self._unused.append(seat)
        self.num_blocks[seats] = 0

    def blocks_of(self, seat: int) -> Int32Array:
        """[num_blocks] int32, the block ids of a seat, in the order of its tokens."""
        return self.tables[seat, : self.num_blocks[seat]].copy()

    def missing_blocks(self, seats: IntArray, seq_lens: IntArray) -> IntArray:
        """[len(seats)] int64, blocks that each seat lacks to hold that many tokens."""
        missing: IntArray = (seq_lens + (self.virtual_block - 1)) // self.virtual_block - self.num_blocks[seats]
        return missing.clip(min=0)

    def append_blocks(self, seats: IntArray, counts: IntArray, blocks: Int32Array) -> None:
        """Give each seat its count of the blocks, in order."""
        self.tables[np.repeat(seats, counts), spread(counts, self.num_blocks[seats])] = blocks
        self.num_blocks[seats] += counts
