"""Slots of the indexer keys that a step writes: passed through, compressed, or gathered over the PCP ranks.

compress_ratio 1     the batch's slots (PCP: the gathered ones)
compressed           each state's slot beside its last token
compressed, PCP      each rank computes its padded segment, then the segments are gathered
compressed, both     with DCP beside PCP, the segments carry each state's owner
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cpkit.budget import Budget
from cpkit.builders.buffers import Buffer
from cpkit.builders.common import GatheredSlots, GatherSlots, RankBatch
from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.compressed_slots import (
    StateBlocks,
    compressed_slots,
    packed_compressed_slots,
    unpack_compressed_slots,
)
from cpkit.planner.slots import PAD
from cpkit.topology import Shard


@dataclass(frozen=True, slots=True, eq=False)
class SlotStage:
    """Builds the slots for one compress ratio."""

    shard: Shard
    compress_ratio: int
    states_per_block: int
    gather_slots: GatherSlots | None
    segment: Buffer
    gathered: Buffer
    backend: str

    @classmethod
    def make(
        cls,
        shard: Shard,
        budget: Budget,
        compress_ratio: int,
        states_per_block: int,
        gather_slots: GatherSlots | None,
        device: torch.device,
        backend: str,
    ) -> "SlotStage":
        """A stage with its buffers; raises ConfigError without the gather that it needs."""
        if shard.pcp_size > 1 and compress_ratio > 1 and gather_slots is None:
            raise ConfigError(
                f"pcp_size={shard.pcp_size} with compress_ratio={compress_ratio} and no gather_slots: the slots of "
                "states are gathered over the ranks"
            )
        tokens = budget.max_num_batched_tokens

        def slots(name: str, size: int) -> Buffer:
            return Buffer(name, (size,), torch.int64, device, fill=PAD)

        segment = slots("slot_mapping", tokens)
        gathered = slots("gathered slot_mapping", tokens * shard.pcp_size if shard.pcp_size > 1 else 0)
        return cls(shard, compress_ratio, states_per_block, gather_slots, segment, gathered, backend)

    def build(self, batch: RankBatch, block_tables: torch.Tensor) -> torch.Tensor:
        """int64 slots of the batch's tokens (PCP: of all ranks' padded segments, rank after rank)."""
        if self.shard.pcp_size == 1:
            return self._own(batch, block_tables)
        of_all = self._checked(batch)
        if self.compress_ratio == 1:
            return of_all.slot_mapping
        padded = len(of_all.slot_mapping) // self.shard.pcp_size
        out = self.segment.front(padded)
        if self.shard.dcp_size == 1:
            segment = of_all.slot_mapping[self.shard.pcp_rank * padded :][:padded]
            self._compress(compressed_slots, segment, batch, block_tables, out)
        else:
            self._packed(batch, of_all.writes_kv, block_tables, out)
        assert self.gather_slots is not None, "checked when the stage was made"
        gathered = self.gather_slots(out)
        slots = self.gathered.front(padded * self.shard.pcp_size)
        if self.shard.dcp_size == 1:
            slots.copy_(gathered)
        else:
            unpack_compressed_slots(gathered, self.shard, out=slots, backend=self.backend)
        return slots

    def _own(self, batch: RankBatch, block_tables: torch.Tensor) -> torch.Tensor:
        if self.compress_ratio == 1:
            return batch.slot_mapping
        out = self.segment.front(batch.num_tokens)
        self._compress(compressed_slots, batch.slot_mapping[: batch.num_tokens], batch, block_tables, out)
        return out

    def _checked(self, batch: RankBatch) -> GatheredSlots:
        """The slots of all ranks, one padded segment each."""
        if batch.gathered is None:
            raise PlanError(
                f"a batch without gathered slots for {self.shard.pcp_size} PCP ranks: each writes what it stores of "
                "all ranks' tokens"
            )
        num_slots = len(batch.gathered.slot_mapping)
        padded, rest = divmod(num_slots, self.shard.pcp_size)
        if rest or padded < batch.num_real_tokens:
            raise PlanError(
                f"{num_slots} gathered slots for {self.shard.pcp_size} PCP ranks, of which this one has "
                f"{batch.num_real_tokens} tokens: every rank's segment has the same padded size"
            )
        return batch.gathered

    def _packed(
        self, batch: RankBatch, writes_kv: torch.Tensor | None, block_tables: torch.Tensor, out: torch.Tensor
    ) -> None:
        if writes_kv is None:
            raise PlanError(
                "compressed keys under PCP + DCP without writes_kv: a token's own slot is -1 on all ranks but its "
                "owner, so it cannot tell which copy of a token writes"
            )
        if len(writes_kv) != len(out):
            raise PlanError(
                f"writes_kv has {len(writes_kv)} entries for a segment of {len(out)} tokens: one a token, "
                "padding (which writes nothing) included"
            )
        self._compress(packed_compressed_slots, writes_kv, batch, block_tables, out)

    def _compress(
        self,
        kernel: Callable[..., None],
        tokens: torch.Tensor,
        batch: RankBatch,
        block_tables: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Slots of the states that this rank's tokens complete; tokens: their slots, or which of them write."""
        states = StateBlocks(block_tables, self.compress_ratio, self.states_per_block)
        kernel(tokens, batch.rows, states, self.shard, out=out, backend=self.backend)
