"""One deployment that a sweep may try."""

from dataclasses import asdict, dataclass
from typing import Any

CUTS = {"head_tail": "", "head_tail_even": " even", "contiguous": " contig", "round_robin": " rr"}
"""Partitions in a candidate's name."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One deployment: `replicas` worlds of tp * pcp GPUs, each with its share of the requests.

    interleave, block_size: tokens. partition: one of the planner's. max_num_batched_tokens: the batch budget.
    """

    gpus: int
    tp: int
    pcp: int
    dcp: int
    interleave: int
    block_size: int
    partition: str
    max_num_batched_tokens: int

    @property
    def replicas(self) -> int:
        """Worlds that the GPUs make."""
        return self.gpus // (self.tp * self.pcp)

    @property
    def name(self) -> str:
        """Short, and unique among those of as many GPUs.  2x tp4 pcp2 dcp8, 8k"""
        tokens = self.max_num_batched_tokens
        budget = f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"
        turns = f" i{self.interleave}" if self.dcp > 1 and self.interleave != self.block_size else ""
        cut = CUTS[self.partition] if self.pcp > 1 else ""
        return f"{self.replicas}x tp{self.tp} pcp{self.pcp} dcp{self.dcp}{turns}{cut}, {budget}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
