"""DCP placement: which rank stores which KV position, and where in its shard.

Positions are dealt to the ranks in turns of `interleave`; a turn of every rank is a round. Over compressed states (one
per c tokens) the same rules hold with positions and lengths counted in states, and turns in keys_a_turn.
"""

from typing import TypeVar

import numpy as np

from cpkit.arrays import IntArray

Ints = TypeVar("Ints", int, IntArray)


def split_position(pos: Ints, dcp_size: int, interleave: int) -> tuple[Ints, Ints]:
    """Owner rank and local index of a KV position.  dcp_size=2, interleave=2:

    pos          0 1 2 3 4 5 6 7 8
    owner        0 0 1 1 0 0 1 1 0
    local index  0 1 0 1 2 3 2 3 4
    """
    turn, within = divmod(pos, interleave)
    rounds, owner = divmod(turn, dcp_size)
    return owner, rounds * interleave + within


def join_position(owner: Ints | int, local: Ints, dcp_size: int, interleave: int) -> Ints:
    """KV position of a rank's local index; undoes split_position."""
    rounds, within = divmod(local, interleave)
    return (rounds * dcp_size + owner) * interleave + within


def local_lens(lens: IntArray, rank: int | IntArray, dcp_size: int, interleave: int) -> IntArray:
    """How many of the first `lens` positions a rank stores; summed over the ranks this gives `lens` back.

    lens: int64, any shape; rank: one rank or ranks that broadcast against it.  dcp_size=2, interleave=2:

    lens    0 1 2 3 4 5
    rank 0  0 1 2 2 2 3
    rank 1  0 0 0 1 2 2
    """
    round_len = dcp_size * interleave
    rounds = lens // round_len
    rest = lens - rounds * round_len - rank * interleave
    held: IntArray = rounds * interleave + np.minimum(np.maximum(rest, 0), interleave)
    return held


def keys_a_turn(interleave: int, compress_ratio: int, dcp_size: int) -> int:
    """Keys that a rank keeps before the next rank's turn: interleave counted in keys of compress_ratio tokens.

    interleave=64, compress_ratio=4: 16. One rank alone (dcp_size=1) has no turns, and any interleave is 1.
    """
    return interleave // compress_ratio if dcp_size > 1 else 1


def largest_shard(lens: Ints, dcp_size: int, interleave: int) -> Ints:
    """Length of the longest shard, which rank 0 always holds."""
    rounds, rest = divmod(lens, dcp_size * interleave)
    if isinstance(rest, np.ndarray):
        return rounds * interleave + np.minimum(rest, interleave)
    return rounds * interleave + min(rest, interleave)
