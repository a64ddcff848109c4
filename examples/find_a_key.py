"""Where does the KV of one position live? Owner rank, place in its shard, slot in its paged cache, and back.

Run: python examples/find_a_key.py
"""

import numpy as np

from cpkit.planner.interleave import join_position, local_lens, split_position
from cpkit.planner.slots import sharded_slots
from cpkit.topology import Topology


def main() -> None:
    topology = Topology(tp=8, dcp=4, interleave=16, block_size=64)
    # one request; a block id spans block_size * dcp tokens: 64 on each rank of the group
    block_tables = np.array([[7, 3, 9]], np.int32)
    context = 700

    print(f"a context of {context} tokens over dcp={topology.dcp}, interleave={topology.interleave}")
    for dcp_rank in range(topology.dcp):
        held = local_lens(np.array([context]), dcp_rank, topology.dcp, topology.interleave)
        print(f"  dcp rank {dcp_rank} stores {held[0]} keys")

    for position in (0, 16, 64, 699):
        owner, local = split_position(position, topology.dcp, topology.interleave)
        (slot,) = sharded_slots(
            np.array([position]),
            np.array([0]),
            block_tables,
            block_size=topology.block_size,
            dcp_size=topology.dcp,
            dcp_rank=owner,
            interleave=topology.interleave,
        )
        print(f"position {position:3}: dcp rank {owner}, key {local:3} of its shard, slot {slot}")
        assert join_position(owner, local, topology.dcp, topology.interleave) == position


if __name__ == "__main__":
    main()
