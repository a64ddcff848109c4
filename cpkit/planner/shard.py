"""DCP shards of a batch: how many keys of each request a rank stores."""

from dataclasses import dataclass

from cpkit.arrays import IntArray, freeze, seal
from cpkit.planner.interleave import keys_a_turn, largest_shard, local_lens


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Keys of each request's context, and of its shards, for one compress ratio.

    compress_ratio: tokens per key; dcp_size, interleave: interleave counts keys here, 1 without DCP.
    num_keys: [num_reqs] int64, keys of the whole context, this step's included.
    shard_keys: [num_reqs] int64, keys of the largest shard, which every rank pads its own to.
    """

    compress_ratio: int
    dcp_size: int
    interleave: int
    num_keys: IntArray
    shard_keys: IntArray

    def local_lens(self, dcp_rank: int) -> IntArray:
        """[num_reqs] int64, keys that one rank stores; over the ranks they add up to num_keys."""
        return local_lens(self.num_keys, dcp_rank, self.dcp_size, self.interleave)


def shard_kv(seq_lens: IntArray, compress_ratio: int, *, dcp_size: int, interleave: int) -> Shards:
    """Shards of contexts of seq_lens tokens ([num_reqs] int64); interleave in tokens, a multiple of compress_ratio."""
    num_keys = seq_lens // compress_ratio if compress_ratio > 1 else seq_lens
    turn = keys_a_turn(interleave, compress_ratio, dcp_size)
    num_keys = freeze(num_keys)
    shard_keys = seal(largest_shard(num_keys, dcp_size, turn)) if dcp_size > 1 else num_keys
    return Shards(compress_ratio, dcp_size, turn, num_keys, shard_keys)
