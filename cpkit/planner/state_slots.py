"""Slots of compressed keys: which token writes which state of `compress_ratio` tokens, and where.

The states of a request are dealt to the DCP ranks like its tokens, a turn being interleave // compress_ratio states, so
a state lies on one rank if the interleave is a multiple of the ratio.
"""

from typing import NamedTuple

import numpy as np

from cpkit.arrays import BoolArray, Int32Array, IntArray
from cpkit.errors import ConfigError, PlanError
from cpkit.planner.interleave import split_position
from cpkit.planner.slots import PAD, BlockTables, as_int32, write_slots


class StatePlaces(NamedTuple):
    """Where the states end up that this batch completes."""

    token: IntArray  # [num_states], the flat token that writes each state
    owner: IntArray  # [num_states], the DCP rank that stores it
    slot: IntArray  # [num_states], its slot on that rank


def state_places(
    positions: IntArray,
    req: IntArray,
    block_tables: BlockTables,
    *,
    compress_ratio: int,
    states_per_block: int,
    dcp_size: int = 1,
    interleave: int = 1,
    written: BoolArray | None = None,
) -> StatePlaces:
    """Token, owner and slot of every state that is completed.  compress_ratio=2, states_per_block=2, block table 3:

        position   0 1 2 3 4         the last token of a state writes it
        slot       - 6 - 7 -         3 * 2 + 0, 3 * 2 + 1

    positions, req: [num_tokens] int64; written: [num_tokens] bool, False for tokens whose own KV is not written
    (padding, replayed tokens), which complete no state; default: all True.
    Raises ConfigError if a state would span two ranks, PlanError as sharded_slots does.
    """
    check_states_whole(compress_ratio, dcp_size, interleave)
    completes = (positions + 1) % compress_ratio == 0
    token = np.flatnonzero(completes if written is None else completes & written)
    pos = positions[token]
    owner, local = split_position(pos, dcp_size, interleave)
    slot = write_slots(local // compress_ratio, req[token], block_tables, states_per_block, pos)
    return StatePlaces(token, owner, slot)


def sharded_state_slots(places: StatePlaces, *, num_tokens: int, dcp_rank: int) -> IntArray:
    """[num_tokens] int64, the slot each token writes on one DCP rank, PAD for all others and for the tail."""
    out = np.full(num_tokens, PAD, np.int64)
    mine = places.owner == dcp_rank
    out[places.token[mine]] = places.slot[mine]
    return out


def packed_state_slots(places: StatePlaces, *, num_tokens: int, dcp_size: int) -> IntArray:
    """[num_tokens] int64, slot and owner of each token's state in one number, PAD where there is none.

    What a PCP rank puts into the all-gather for its own padded tokens, since the owner may be any rank.  dcp_size=2:

        slot    5 9 -
        owner   0 1 -
        packed 10 19 -1       slot * dcp_size + owner
    """
    if len(places.slot) and int(places.slot.max()) > (np.iinfo(np.int64).max - dcp_size) // dcp_size:
        raise PlanError(f"slot {int(places.slot.max())} packed with dcp_size={dcp_size} exceeds 64 bits")
    out = np.full(num_tokens, PAD, np.int64)
    out[places.token] = places.slot * dcp_size + places.owner
    return out


def unpack_state_slots(packed: IntArray, *, dcp_size: int, dcp_rank: int) -> IntArray:
    """The slots of one DCP rank out of gathered packed ones, PAD where another rank owns the state."""
    slot, owner = np.divmod(packed, dcp_size)
    return np.where((packed >= 0) & (owner == dcp_rank), slot, PAD)


def check_states_whole(compress_ratio: int, dcp_size: int, interleave: int) -> None:
    """Raise ConfigError unless every state lies on one DCP rank."""
    if dcp_size > 1 and interleave % compress_ratio:
        raise ConfigError(
            f"interleave={interleave} is not a multiple of compress_ratio={compress_ratio}: a state would span two "
            f"of the dcp_size={dcp_size} ranks; use {compress_ratio} or a multiple of it"
        )


def cache_block_tables(kernel_tables: BlockTables, factor: int) -> BlockTables:
    """Block tables in cache blocks, from tables in kernel blocks of which `factor` make one.  factor=2:

    kernel blocks  6 7 2 3        cache blocks  3 1

    Raises PlanError where a group does not start on a cache block. Undone by kernel_block_tables.
    """
    heads = kernel_tables[:, ::factor]
    odd = np.argwhere(heads % factor)
    if len(odd):
        row, column = odd[0].tolist()
        raise PlanError(
            f"request {row}: kernel block {int(heads[row, column])} in column {column * factor} does not start a cache "
            f"block of factor={factor} kernel blocks"
        )
    return heads // factor


def kernel_block_tables(cache_tables: BlockTables, factor: int) -> Int32Array:
    """Block tables in kernel blocks, `factor` for each cache block; undoes cache_block_tables."""
    blocks = cache_tables.astype(np.int64)[:, :, None] * factor + np.arange(factor)
    return as_int32("a kernel block id", blocks.reshape(len(cache_tables), cache_tables.shape[1] * factor))
