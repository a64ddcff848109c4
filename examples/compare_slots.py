"""Which tokens does an engine store in the wrong place? Its slot mapping of one step, compared on every DCP rank.

Run: python examples/compare_slots.py
"""

import numpy as np

from cpkit.arrays import IntArray
from cpkit.planner.interleave import split_position
from cpkit.planner.slots import sharded_slots, token_positions

# One step as the engine had it: a decode, and a prefill of 130 tokens. A block id spans block_size * dcp tokens.
SEQ_LENS, QUERY_LENS = np.array([700, 130]), np.array([1, 130])
BLOCK_TABLES = np.array([[7, 3, 9], [4, 0, 0]], np.int32)
BLOCK_SIZE, DCP, INTERLEAVE = 64, 4, 16


def main() -> None:
    req, position = token_positions(SEQ_LENS, QUERY_LENS)
    owner, _ = split_position(position, DCP, INTERLEAVE)
    for dcp_rank in range(DCP):
        engine = engine_slots(req, position, dcp_rank)  # put your rank's dump here: np.load(...)
        right = slots(req, position, dcp_rank, INTERLEAVE)
        wrong = np.flatnonzero(engine != right)
        print(f"dcp rank {dcp_rank}: {len(wrong)} of {len(right)} tokens have another slot")
        for token in wrong[:2]:
            where = f"token {token}, request {req[token]} position {position[token]} of dcp rank {owner[token]}"
            print(f"  {where}: engine {engine[token]}, should be {right[token]}")


def slots(req: IntArray, position: IntArray, dcp_rank: int, interleave: int) -> IntArray:
    """[num_tokens], the slot of each token on one rank, -1 where another rank stores it."""
    return sharded_slots(
        position,
        req,
        BLOCK_TABLES,
        block_size=BLOCK_SIZE,
        dcp_size=DCP,
        dcp_rank=dcp_rank,
        interleave=interleave,
    )


def engine_slots(req: IntArray, position: IntArray, dcp_rank: int) -> IntArray:
    """An engine with a fault: rank 2 was started without the interleave, and deals keys out one by one."""
    return slots(req, position, dcp_rank, 1 if dcp_rank == 2 else INTERLEAVE)


if __name__ == "__main__":
    main()
