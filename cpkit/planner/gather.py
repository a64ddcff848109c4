"""PCP + DCP prefill: how the DCP shards of a chunk's keys become one buffer in token order.

Every rank sends its shard of each request padded to the largest; the all-gather lays the ranks one after another.
dcp_size=2, interleave=1, requests of 3 and 1 keys (-- is padding):

    rank 0 | rank 1     a0 a2 b0 | a1 -- --
    token order         a0 a1 a2 --   b0 --          regions of shard_keys * dcp_size keys
    deinterleave_idx     0  3  1  4    2  5
"""

from dataclasses import dataclass

import numpy as np

from cpkit.arrays import IntArray, ceil_div, prefix_sum, seal
from cpkit.errors import PlanError
from cpkit.planner.chunks import Chunk
from cpkit.planner.interleave import split_position
from cpkit.planner.order import request_row_bounds


@dataclass(frozen=True, slots=True, eq=False)
class GatherPlan:
    """Regions of one chunk, one a request, kept as formulas: O(requests), whatever the context.

    dcp_size, interleave: as in the shards, interleave in keys.
    first_local: index in its shard of the first key that each rank sends (above 0 for a later key span).
    shard_keys: [regions] int64, padded keys of a request that each rank sends.
    row_region: [rows of the chunk] int64, the region of each row.
    """

    dcp_size: int
    interleave: int
    first_local: int
    shard_keys: IntArray
    row_region: IntArray

    @property
    def keys_per_rank(self) -> int:
        """Padded keys that each rank contributes."""
        return int(self.shard_keys.sum())

    @property
    def num_keys(self) -> int:
        """Keys of the buffer in token order, padding included."""
        return self.keys_per_rank * self.dcp_size

    def region_start(self) -> IntArray:
        """[regions + 1] int64, where each request's keys start in token order."""
        return prefix_sum(self.shard_keys) * self.dcp_size

    def local_start(self) -> IntArray:
        """[regions + 1] int64, where each request's keys start in what one rank sends."""
        return prefix_sum(self.shard_keys)

    def deinterleave_idx(self) -> IntArray:
        """[num_keys] int64, for each key in token order its place in the rank-major gathered buffer.

        Places behind a request's last key are clamped into its region: no query sees them, they only stay in range.
        """
        out = np.empty(self.num_keys, np.int64)
        start = self.local_start()
        for region, num_keys in enumerate(self.shard_keys.tolist()):
            self._fill(out[int(start[region]) * self.dcp_size :], num_keys, int(start[region]))
        return out

    def _fill(self, out: IntArray, shard_keys: int, start: int) -> None:
        """One region: whole rounds as an outer sum, the rest key by key."""
        rounds, rest = divmod(shard_keys, self.interleave)
        round_keys = self.dcp_size * self.interleave
        first = np.add.outer(np.arange(self.dcp_size) * self.keys_per_rank + start, np.arange(self.interleave)).ravel()
        whole = out[: rounds * round_keys].reshape(rounds, round_keys)
        np.add.outer(np.arange(rounds) * self.interleave, first, out=whole)
        if rest:
            key = np.arange(rounds * round_keys, shard_keys * self.dcp_size)
            owner, local = split_position(key, self.dcp_size, self.interleave)
            out[rounds * round_keys : shard_keys * self.dcp_size] = (
                owner * self.keys_per_rank + start + np.minimum(local, shard_keys - 1)
            )


def plan_gather(
    chunk: Chunk, row_req: IntArray, row_shard_keys: IntArray, *, dcp_size: int, interleave: int
) -> GatherPlan:
    """The gather of one chunk.

    row_req, row_shard_keys: [rows] int64, request of each prefill row and keys of its request's largest shard; rows
    of a request are adjacent and agree, else PlanError. interleave in keys. A request without keys has an empty region.
    """
    rows = slice(chunk.row_start, chunk.row_stop)
    bounds = request_row_bounds(row_req[rows])
    row_region = np.arange(len(bounds) - 1).repeat(bounds[1:] - bounds[:-1])
    row_keys = row_shard_keys[rows]
    shard_keys = row_keys[bounds[:-1]]
    differs = shard_keys[row_region] != row_keys
    if differs.any():
        bad = int(differs.argmax()) + chunk.row_start
        raise PlanError(
            f"row {bad} of request {int(row_req[bad])}: largest shard {int(row_shard_keys[bad])} keys, but an earlier "
            "row of the request has another; the largest shard belongs to the whole request"
        )
    first_local = chunk.key_start // dcp_size
    if len(shard_keys) == 1:
        shard_keys = np.minimum(shard_keys, ceil_div(chunk.key_stop, dcp_size)) - first_local
    return GatherPlan(dcp_size, interleave, first_local, seal(shard_keys), seal(row_region))
