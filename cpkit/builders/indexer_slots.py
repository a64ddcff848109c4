"""Slots of the indexer keys that a step writes: passed through, compressed, or gathered over the PCP ranks.

compress_ratio 1     the batch's slots
compressed           each state's slot beside its last token
compressed, PCP      each rank computes its padded segment, then the segments are gathered
compressed, both     with DCP beside PCP, the segments carry each state's owner
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cpkit.budget import Budget
from cpkit.builders.buffers import Buffer
from cpkit.builders.common import Comm, RankBatch, Shard
from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.compressed_slots import compressed_slots, packed_compressed_slots, unpack_compressed_slots
from cpkit.planner.slots import PAD


@dataclass(frozen=True, slots=True, eq=False)
class SlotStage:
    """Builds the slots for one compress ratio."""

    shard: Shard
    compress_ratio: int
    states_per_block: int
    comm: Comm | None
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
        comm: Comm | None,
        device: torch.device,
        backend: str,
    ) -> "SlotStage":
        """A stage with its buffers; raises ConfigError without the comm that it needs."""
        if shard.pcp_size > 1 and compress_ratio > 1 and comm is None:
            raise ConfigError(
                f"pcp_size={shard.pcp_size} with compress_ratio={compress_ratio} and no comm: the ranks gather their "
                "slots"
            )
        tokens = budget.max_num_batched_tokens

        def slots(name: str, size: int) -> Buffer:
            return Buffer(name, (size,), torch.int64, device, fill=PAD)

        segment = slots("slot_mapping", tokens)
        gathered = slots("gathered slot_mapping", tokens * shard.pcp_size if shard.pcp_size > 1 else 0)
        return cls(shard, compress_ratio, states_per_block, comm, segment, gathered, backend)

    def build(self, batch: RankBatch, block_tables: torch.Tensor) -> torch.Tensor:
        """int64 slots of the batch's tokens (PCP: of all ranks' padded segments, rank after rank)."""
        if self.compress_ratio == 1:
            return batch.slot_mapping
        if self.shard.pcp_size == 1:
            out = self.segment.front(batch.num_tokens)
            self._compress(compressed_slots, batch.slot_mapping[: batch.num_tokens], batch, block_tables, out)
            return out
        padded = self.padded(batch)
        out = self.segment.front(padded)
        if self.shard.dcp_size == 1:
            segment = batch.slot_mapping[self.shard.pcp_rank * padded :][:padded]
            self._compress(compressed_slots, segment, batch, block_tables, out)
        else:
            self._packed(batch, block_tables, out)
        assert self.comm is not None, "checked when the stage was made"
        gathered = self.comm.all_gather(out, "pcp")
        slots = self.gathered.front(padded * self.shard.pcp_size)
        if self.shard.dcp_size == 1:
            slots.copy_(gathered)
        else:
            dcp_size, dcp_rank = self.shard.dcp_size, self.shard.dcp_rank
            unpack_compressed_slots(gathered, dcp_size=dcp_size, dcp_rank=dcp_rank, out=slots, backend=self.backend)
        return slots

    def padded(self, batch: RankBatch) -> int:
        """Tokens of one rank's segment of the gathered slots."""
        padded, rest = divmod(len(batch.slot_mapping), self.shard.pcp_size)
        if rest or padded < batch.num_real_tokens:
            raise PlanError(
                f"{len(batch.slot_mapping)} gathered slots for {self.shard.pcp_size} PCP ranks, of which this one has "
                f"{batch.num_real_tokens} tokens: every rank's segment has the same padded size"
            )
        return padded

    def _packed(self, batch: RankBatch, block_tables: torch.Tensor, out: torch.Tensor) -> None:
        if batch.writes_kv is None:
            raise PlanError(
                "compressed keys under PCP + DCP without writes_kv: a token's own slot is -1 on all ranks but its "
                "owner, so it cannot tell which copy of a token writes"
            )
        if len(batch.writes_kv) != len(out):
            raise PlanError(
                f"writes_kv has {len(batch.writes_kv)} entries for a segment of {len(out)} tokens: one a token, "
                "padding (which writes nothing) included"
            )
        self._compress(packed_compressed_slots, batch.writes_kv, batch, block_tables, out)

    def _compress(
        self,
        kernel: Callable[..., None],
        tokens: torch.Tensor,
        batch: RankBatch,
        block_tables: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Slots of the states that this rank's tokens complete; tokens: their slots, or which of them write."""
        kernel(
            tokens,
            batch.query_start_loc,
            batch.seq_lens,
            block_tables,
            compress_ratio=self.compress_ratio,
            states_per_block=self.states_per_block,
            dcp_size=self.shard.dcp_size,
            interleave=self.shard.interleave,
            row_stride=batch.row_stride,
            out=out,
            backend=self.backend,
        )
