"""Slots: the physical row of the paged KV cache that each query token writes; -1 writes nothing.

A request's block table names the cache block of each run of `block_size` keys that one rank holds.
"""

import numpy as np
import numpy.typing as npt

from cpkit.arrays import BoolArray, Int32Array, IntArray, spread
from cpkit.errors import PlanError
from cpkit.planner.interleave import split_position

PAD = -1
"""The slot of a token that writes nothing."""

NULL_BLOCK = 0
"""The block id that stands for no block; nothing is ever written there."""

BlockTables = Int32Array | IntArray


def token_positions(seq_lens: IntArray, query_lens: IntArray) -> tuple[IntArray, IntArray]:
    """Request and position of every query token, [num_tokens] int64 each.  seq_lens 5 2, query_lens 2 1:

    request   0 0 1
    position  3 4 1

    Raises PlanError where seq_len < query_len: a token would sit before position 0, in another block.
    """
    short = np.flatnonzero(seq_lens < query_lens)
    if short.size:
        i = int(short[0])
        raise PlanError(
            f"request {i}: seq_len={int(seq_lens[i])} < query_len={int(query_lens[i])}: seq_len counts this step's "
            "query tokens, so a position would be negative"
        )
    req = np.repeat(np.arange(len(query_lens)), query_lens)
    return req, spread(query_lens, seq_lens - query_lens)


def sharded_slots(
    positions: IntArray,
    req: IntArray,
    block_tables: BlockTables,
    *,
    block_size: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
) -> IntArray:
    """Slot of each token on one DCP rank.  block_size=2, dcp_size=2, interleave=1, block table 7 9:

        position     0  1  2  3  4
        slot rank 0 14  - 15  - 18      a block id spans block_size * dcp_size positions
        slot rank 1  - 14  - 15  -

    positions, req: [num_tokens] int64, position and request (row of block_tables) of each token.
    Returns [num_tokens] int64, PAD on the ranks that do not own the position. Every rank refuses the same batches:
    PlanError if a token's block, whoever owns it, lies past the block table or is the null block.
    """
    owner, local = split_position(positions, dcp_size, interleave)
    slots = write_slots(local, req, block_tables, block_size, positions)
    return np.where(owner == dcp_rank, slots, PAD)


def replicated_slots(positions: IntArray, req: IntArray, block_tables: BlockTables, *, block_size: int) -> IntArray:
    """Slot of each token in a cache that every DCP rank holds whole (sliding window, per-request state).

    Such a cache never goes through the DCP placement: block_size=4, position 6 is offset 2 of the request's block 1 on
    every rank. Arguments, result and refusals as for sharded_slots.
    """
    return write_slots(positions, req, block_tables, block_size, positions)


def tail_slots(
    positions: IntArray,
    req: IntArray,
    block_tables: BlockTables,
    *,
    kpool: int,
    skip_null_blocks: bool = True,
) -> IntArray:
    """Slot of each token in its request's circular block of `kpool` rows.  kpool=4, block table 5:

        position   3  4  5  6  7  8
        slot      23 20 21 22 23 20

    Only column 0 of block_tables is read; the cache is replicated. positions, req: [num_tokens] int64.
    A request without a tail block (null block) gets PAD; with skip_null_blocks=False its block 0 counts as any block.
    """
    if block_tables.ndim != 2 or not block_tables.shape[1]:
        raise PlanError(f"block_tables of shape {block_tables.shape}: the tail block of a request is in column 0")
    block = block_tables[req, 0].astype(np.int64)
    slots = block * kpool + positions % kpool
    return np.where(block == NULL_BLOCK, PAD, slots) if skip_null_blocks else slots


def write_slots(
    rows: IntArray, req: IntArray, block_tables: BlockTables, rows_per_block: int, positions: IntArray
) -> IntArray:
    """[n] int64, slot of row `rows[i]` of request `req[i]`; raises PlanError where nothing may be written.

    rows: [n] int64 >= 0, counted in the units the block table's blocks hold (tokens or states of one shard).
    positions: [n] int64, the token positions behind them, for the message only.
    """
    column, offset = np.divmod(rows, rows_per_block)
    width = block_tables.shape[1]
    if not len(rows):
        return np.zeros(0, np.int64)
    late = np.flatnonzero(column >= width)
    if late.size:
        i = int(late[0])
        raise PlanError(
            f"request {int(req[i])}: position {int(positions[i])} needs entry {int(column[i])} of a block table that "
            f"is {width} wide: allocate its blocks before the step"
        )
    block = block_tables[req, column].astype(np.int64)
    if (block == NULL_BLOCK).any():
        i = int(np.flatnonzero(block == NULL_BLOCK)[0])
        raise PlanError(
            f"request {int(req[i])}: position {int(positions[i])} lies in entry {int(column[i])} of its block table "
            f"(width {width}), which is the null block {NULL_BLOCK}: a position to write needs a block of its own"
        )
    return block * rows_per_block + offset


def as_int32(name: str, values: npt.NDArray[np.int64]) -> Int32Array:
    """The same values as int32, for a kernel that documents it; raises PlanError naming the quantity, never wraps."""
    info = np.iinfo(np.int32)
    if values.size and (values.max() > info.max or values.min() < info.min):
        top = int(values.max() if values.max() > info.max else values.min())
        raise PlanError(f"{name} reaches {top}, outside int32: the kernel that reads it addresses 2^31 rows at most")
    return values.astype(np.int32)


def padded_slots(slots: IntArray, length: int) -> IntArray:
    """[length] int64, the slots and then PAD: the whole buffer, its tail included, names no stale row."""
    if length < len(slots):
        raise PlanError(f"a buffer of {length} slots for {len(slots)} tokens: padding adds only")
    out = np.full(length, PAD, np.int64)
    out[: len(slots)] = slots
    return out


def written(slots: IntArray) -> BoolArray:
    """[num_tokens] bool, the tokens whose own KV is written: padding and replayed tokens are not."""
    mask: BoolArray = slots != PAD
    return mask
