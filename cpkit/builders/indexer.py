"""The indexer's metadata builder: slots, prefill chunks and decode rows of one rank's step.

batch ─► slots ─► split ─┬─► prefill: chunks, key ranges
         (PCP gather)    └─► decode: rows, tile schedule
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cpkit.arrays import IntArray, ceil_div
from cpkit.budget import Budget
from cpkit.builders.backend import choose_backend
from cpkit.builders.buffers import Buffer
from cpkit.builders.checks import check_fits, check_reach, check_update
from cpkit.builders.chip import Chip
from cpkit.builders.common import GatherSlots, RankBatch
from cpkit.builders.graphs import GraphSupport
from cpkit.builders.indexer_decode import DecodeStage, decode_buffers, fixed_path
from cpkit.builders.indexer_metadata import IndexerMetadata
from cpkit.builders.indexer_prefill import PrefillStage
from cpkit.builders.indexer_slots import SlotStage
from cpkit.errors import ConfigError, PlanError
from cpkit.planner.order import BatchSplit, split_decodes_and_prefills
from cpkit.planner.state_slots import check_states_whole
from cpkit.topology import Shard


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Settings of an indexer cache and its builder. Raises ConfigError.

    block_size: tokens of a cache block on one rank; kernel_block_size: tokens of an entry of the batch's block tables
        (default: the same), of which several make a compressed cache's block.
    compress_ratio: tokens per key. max_blocks: entries of a block table.
    adaptive: decodes' query lengths are decided on the device, at most those the host knows.
    """

    budget: Budget
    chip: Chip
    shard: Shard
    block_size: int
    max_blocks: int
    compress_ratio: int = 1
    kernel_block_size: int | None = None
    adaptive: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_blocks", "compress_ratio", "kernel_block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: it must be at least 1")
        if self.block_size % self.compress_ratio:
            raise ConfigError(
                f"block_size={self.block_size} is not a multiple of compress_ratio={self.compress_ratio}: a block "
                "would end inside a state"
            )
        if self.compress_ratio > 1 and self.block_size % self.entry_size:
            raise ConfigError(
                f"kernel_block_size={self.entry_size} does not divide block_size={self.block_size}: the entries of a "
                "compressed cache's block tables make whole blocks"
            )
        check_states_whole(self.compress_ratio, self.shard.dcp_size, self.shard.interleave)

    @property
    def entry_size(self) -> int:
        """Tokens that one entry of the batch's block tables holds on one rank."""
        return self.block_size if self.kernel_block_size is None else self.kernel_block_size

    @property
    def entries_per_block(self) -> int:
        """Entries of the batch's block tables that make one block of the tables handed to kernels."""
        return self.block_size // self.entry_size if self.compress_ratio > 1 else 1

    @property
    def states_per_block(self) -> int:
        """Keys of one entry of the tables handed to kernels."""
        return (self.block_size if self.compress_ratio > 1 else self.entry_size) // self.compress_ratio


class IndexerBuilder:
    """Builds IndexerMetadata, step after step, into the same buffers: a step's result is valid until the next build.

    gather_slots: needed under PCP with compressed keys, whose slots are gathered over the ranks.
    widen_lens: for layers whose logits are wider than their keys; [rows] keys -> [rows] keys that the budgets count.
    backend: of the kernels that it runs, "triton" or "torch"; None: the device's own (builders/backend.py).
    """

    def __init__(
        self,
        config: IndexerConfig,
        *,
        device: torch.device | str = "cpu",
        gather_slots: GatherSlots | None = None,
        widen_lens: Callable[[IntArray], IntArray] | None = None,
        backend: str | None = None,
    ) -> None:
        self.config = config
        self.device = torch.empty(0, device=device).device
        self.backend = choose_backend(backend, self.device)
        budget, chip, shard, ratio = config.budget, config.chip, config.shard, config.compress_ratio
        blocks = ceil_div(config.max_blocks, config.entries_per_block)
        fixed = fixed_path(chip, budget.num_speculative_tokens, adaptive=config.adaptive)
        self.graph_support = GraphSupport.UNIFORM if fixed is None else GraphSupport.ALWAYS
        self._tables = Buffer("block_tables", (budget.max_num_seqs, blocks), torch.int32, self.device)
        self._slots = SlotStage.make(
            shard, budget, ratio, config.states_per_block, gather_slots, self.device, self.backend
        )
        self._prefill = PrefillStage(shard, budget, ratio, self.backend, widen_lens)
        self._decode = DecodeStage(
            shard=shard,
            chip=chip,
            compress_ratio=ratio,
            states_per_block=config.states_per_block,
            adaptive=config.adaptive,
            fixed=fixed,
            buffers=decode_buffers(budget, blocks, chip.num_workers, self.device),
            backend=self.backend,
        )

    def build(self, batch: RankBatch) -> IndexerMetadata:
        """Metadata of a step; raises PlanError. Every PCP rank enters it, those without tokens too."""
        self.check(batch)
        tables = self.cache_tables(batch)
        slots = self._slots.build(batch, tables)
        if not batch.num_tokens:
            return IndexerMetadata(BatchSplit(0, 0, 0, 0), slots, None, None)
        split = self.split(batch)
        return IndexerMetadata(
            split=split,
            slot_mapping=slots,
            prefill=self._prefill.build(batch, split.num_decodes, tables) if split.num_prefills else None,
            decode=self._decode.build(batch, split, tables) if split.num_decodes else None,
        )

    def update_drafts(self, metadata: IndexerMetadata, batch: RankBatch) -> IndexerMetadata:
        """The decode part rebuilt in place from the batch's lengths after a draft step; the rest as it was."""
        if metadata.decode is None:
            return metadata
        self.check(batch)
        check_update(batch, metadata.split)
        return replace(metadata, decode=self._decode.build(batch, metadata.split, self.cache_tables(batch)))

    def split(self, batch: RankBatch) -> BatchSplit:
        """Where the decodes end. Under PCP a short piece of a prompt is a prefill, so that all ranks agree."""
        return split_decodes_and_prefills(
            batch.query_lens,
            batch.is_prefilling,
            threshold=self.config.budget.decode_threshold,
            num_tokens=batch.num_tokens,
            require_uniform=self.graph_support is GraphSupport.UNIFORM,
            treat_short_extends_as_decodes=self.config.shard.pcp_size == 1,
        )

    def cache_tables(self, batch: RankBatch) -> torch.Tensor:
        """[num_rows, width] int32, the batch's block tables in cache blocks; converted ones at a fixed address."""
        factor = self.config.entries_per_block
        if factor == 1:
            return batch.block_tables
        blocks = batch.block_tables[:, ::factor]
        return torch.floor_divide(blocks, factor, out=self._tables.corner(*blocks.shape))

    def check(self, batch: RankBatch) -> None:
        """Refuse a batch that the buffers, the block tables or the mask cannot hold."""
        check_fits(batch, self.config.budget, self.device)
        check_reach(batch, self.config.entry_size * self.config.shard.dcp_size)
        width = batch.block_tables.shape[1]
        if width > self.config.max_blocks:
            raise PlanError(
                f"{width} block table entries, but the builder's buffers hold {self.config.max_blocks}: raise "
                "max_blocks, or hand in fewer columns"
            )
        if not batch.causal:
            raise PlanError(
                "a batch that is not causal: an indexer scores the keys up to each query token; draft blocks have "
                "sliding-window layers alone"
            )
