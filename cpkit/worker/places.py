"""Where a rank stands in a step: its own tokens, the gathered layout that all PCP ranks share, and the slots to write.

P=2, one replicated decode d and a prefill A..G (head_tail); every rank has d, and rank 0's copy writes:

    own tokens       rank 0: d A B G        rank 1: d C D E F
    layout           d A B G - | d C D E F        padded to the fullest rank
    what travels       A B G - |   C D E F        replicated decodes are known everywhere
    writes           x x x x   |   x x x x
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from cpkit.arrays import BoolArray, Int32Array, IntArray
from cpkit.builders.common import GatheredSlots, RankBatch, WholeRequests, rank_batch
from cpkit.errors import PlanError
from cpkit.planner.interleave import largest_shard
from cpkit.planner.layout import GatherLayout
from cpkit.planner.slots import PAD, replicated_slots, sharded_slots
from cpkit.step import RankPlan, StepPlan
from cpkit.views.materialize import gather_layout


@dataclass(frozen=True, eq=False)
class Places:
    """One rank of a planned step, with the index arrays that its program needs. Arrays are made once, on first use.

    plan, rank: the step, and this rank's part of it. device: where the builders' batches go.
    """

    plan: StepPlan
    rank: RankPlan
    device: torch.device

    def __post_init__(self) -> None:
        if self.plan.batch.block_tables is None or not self.plan.batch.num_reqs:
            raise PlanError("a step runs on requests with block tables: without them its keys have no place")

    @property
    def tables(self) -> Int32Array:
        """[num_reqs, width] int32, block ids; each spans a block on every DCP rank."""
        assert self.plan.batch.block_tables is not None, "checked when the places were made"
        return self.plan.batch.block_tables

    @cached_property
    def req(self) -> IntArray:
        """[own tokens] int64, request of each."""
        return self.rank.rows.reqs()

    @cached_property
    def position(self) -> IntArray:
        """[own tokens] int64, place of each in its request."""
        return self.rank.rows.positions()

    @property
    def num_tokens(self) -> int:
        """Query tokens of this rank."""
        return self.rank.rows.total_tokens

    @property
    def num_decode_tokens(self) -> int:
        """Of them, those of decode rows, which come first."""
        return self.rank.rows.num_decode_tokens

    @cached_property
    def num_known(self) -> int:
        """Leading tokens that every PCP rank has itself, so that their KV does not travel: replicated decodes."""
        return self.plan.partition.num_known(self.plan.batch.is_prefilling)

    @cached_property
    def layout(self) -> GatherLayout:
        """Between the flat batch and what the PCP ranks gather."""
        return gather_layout(self.plan)

    @cached_property
    def window_tables(self) -> IntArray:
        """[num_reqs, width * dcp] int64, block ids of the window cache, which every DCP rank holds whole.

        dcp=2, block table 3 1 0 becomes 6 7 2 3 0 0: a block id owns as many blocks there as it spans over the group.
        """
        dcp = self.plan.topology.dcp
        tables = self.tables.astype(np.int64)[:, :, None]
        return np.where(tables == 0, 0, tables * dcp + np.arange(dcp)).reshape(len(tables), -1)

    def batch(self) -> RankBatch:
        """The rank's rows over the sharded caches, as the indexer's builder takes them."""
        plan, rows = self.plan, self.rank.rows
        topology = plan.topology
        flat = sharded_slots(
            plan.batch.positions(),
            self._flat_req(),
            self.tables,
            block_size=topology.block_size,
            dcp_size=topology.dcp,
            dcp_rank=self.rank.dcp_rank,
            interleave=topology.interleave,
        )
        slots = self._in_layout(flat)
        own = slots[self.rank.pcp_rank * plan.padded :][: self.num_tokens]
        batch = self._batch(self.tables, own)
        if topology.pcp == 1:
            return batch
        writes = np.zeros(plan.padded, np.bool_)
        writes[: self.num_tokens] = np.repeat(self._segment_writes(), rows.num_tokens)
        shard_lens = largest_shard(plan.batch.seq_lens, topology.dcp, topology.interleave)
        return replace(
            batch,
            gathered=GatheredSlots(
                torch.tensor(slots, device=self.device), writes_kv=torch.tensor(writes, device=self.device)
            ),
            requests=WholeRequests(
                rows.req,
                max_shard_lens=shard_lens[rows.req],
                largest_shares=plan.partition.largest_share()[rows.req],
            ),
        )

    def window_batch(self) -> RankBatch:
        """The rank's rows over the replicated window cache: every copy of a token is computed, so each has its slot."""
        slots = self._window_slots(self.position, self.req)
        return self._batch(self.window_tables, slots)

    def window_writes(self) -> torch.Tensor:
        """[places of the layout] int64, window slot that each place writes, -1 for padding and further copies."""
        flat = self._window_slots(self.plan.batch.positions(), self._flat_req())
        return torch.tensor(self._in_layout(flat), device=self.device)

    def _batch(self, tables: Int32Array | IntArray, slots: IntArray) -> RankBatch:
        rows = self.rank.rows
        batch = rank_batch(
            rows.num_tokens,
            rows.seq_lens,
            tables[rows.req],
            slots,
            num_tokens=rows.total_tokens,
            is_prefilling=self.plan.batch.is_prefilling[rows.req],
            device=self.device,
        )
        return replace(batch, row_stride=torch.tensor(rows.stride.astype(np.int32), device=self.device))

    def _window_slots(self, position: IntArray, req: IntArray) -> IntArray:
        return replicated_slots(position, req, self.window_tables, block_size=self.plan.topology.block_size)

    def _flat_req(self) -> IntArray:
        return np.repeat(np.arange(self.plan.batch.num_reqs), self.plan.batch.query_lens)

    def _in_layout(self, flat: IntArray) -> IntArray:
        """What each flat token writes, at the places of the gathered layout."""
        if not len(flat):
            return np.full(len(self.layout.gather_idx), PAD, np.int64)
        return np.where(self.layout.writes_kv, flat[self.layout.gather_idx], PAD)

    def _segment_writes(self) -> BoolArray:
        segments = self.plan.partition.segments(self.rank.pcp_rank)
        return segments.writes_kv if len(segments.req) else np.zeros(1, np.bool_)  # the placeholder row
