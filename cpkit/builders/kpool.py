"""The kpool tail builder: which row of its request's circular block each token writes. Storage only, no head sizes.

kpool=4, one request with tail block 5, positions 6 7 8 and one token of padding:

    slot    22 23 20 -1      5 * 4 + position % 4
"""

from dataclasses import dataclass

import torch

from cpkit.budget import Budget
from cpkit.builders.backend import choose_backend
from cpkit.builders.buffers import Buffer
from cpkit.builders.checks import check_fits
from cpkit.builders.common import RankBatch
from cpkit.builders.graphs import GraphSupport
from cpkit.errors import ConfigError
from cpkit.kernels.tail_slots import tail_slots
from cpkit.planner.order import BatchSplit, split_decodes_and_prefills
from cpkit.planner.slots import PAD

DECODE_THRESHOLD = 1


@dataclass(frozen=True, slots=True)
class KpoolConfig:
    """kpool: rows of a request's tail block, which is the cache's block size. Raises ConfigError."""

    budget: Budget
    kpool: int

    def __post_init__(self) -> None:
        if self.kpool < 1:
            raise ConfigError(f"kpool={self.kpool}: a tail block has at least one row")


@dataclass(frozen=True, slots=True, eq=False)
class KpoolMetadata:
    """One step of one rank. slot_mapping: int64, as long as the batch's; padding tokens keep theirs."""

    split: BatchSplit
    slot_mapping: torch.Tensor


class KpoolBuilder:
    """Builds KpoolMetadata, step after step, into the same buffer. A built step does not follow new block tables.

    backend: of the kernel that it runs, "triton" or "torch"; None: the device's own (builders/backend.py).
    """

    graph_support = GraphSupport.ALWAYS

    def __init__(self, config: KpoolConfig, *, device: torch.device | str = "cpu", backend: str | None = None) -> None:
        self.config = config
        self.device = torch.empty(0, device=device).device
        self.backend = choose_backend(backend, self.device)
        tokens = config.budget.max_num_batched_tokens
        self._slots = Buffer("tail slot_mapping", (tokens,), torch.int64, self.device, fill=PAD)

    def build(self, batch: RankBatch) -> KpoolMetadata:
        """Tail slots of a step; without positions the batch's slots are kept. Raises PlanError."""
        check_fits(batch, self.config.budget, self.device)
        split = split_decodes_and_prefills(batch.query_lens, threshold=DECODE_THRESHOLD, num_tokens=batch.num_tokens)
        slots = self._slots.front(len(batch.slot_mapping))
        if batch.positions is None:
            slots.copy_(batch.slot_mapping)
        else:
            tail_slots(
                batch.slot_mapping,
                batch.positions,
                batch.query_start_loc,
                batch.block_tables,
                kpool=self.config.kpool,
                num_tokens=batch.num_real_tokens,
                out=slots,
                backend=self.backend,
            )
        return KpoolMetadata(split, slots)
