"""What decides which kernels the ranks of a deployment compile: sizes that no step and no rank changes.

Everything else (how many tokens, rows and blocks, which rank, how wide the window) is a plain argument, and kernels
are told not to look at its value. One rank's list is therefore every rank's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deployment:
    """The sizes that kernels are compiled with.

    pcp_size, dcp_size, interleave: the topology; interleave in tokens. block_size: tokens of a cache block.
    states: (compress_ratio, states_per_block) of each kind of compressed cache. kpool: rows of a tail block, 0: none.
    swa_block_size: tokens of a block of the window cache, 0: none. draft_blocks: drafts that see each other.
    """

    block_size: int
    pcp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1
    states: tuple[tuple[int, int], ...] = ()
    kpool: int = 0
    swa_block_size: int = 0
    draft_blocks: bool = False

    def ratios(self) -> list[int]:
        """Compress ratios of its caches, 1 (uncompressed keys) among them."""
        return sorted({1, *(ratio for ratio, _ in self.states)})


SAMPLES = {
    "one-rank": Deployment(block_size=64, states=((4, 64), (128, 2)), kpool=16, swa_block_size=64, draft_blocks=True),
    "sharded": Deployment(block_size=64, pcp_size=8, dcp_size=8, interleave=256, states=((4, 64),), swa_block_size=64),
    "odd": Deployment(block_size=100, dcp_size=5, interleave=21, states=((3, 7),), swa_block_size=100),
}
"""Deployments whose kernels are compiled ahead of time for every target; one is odd in every number."""
