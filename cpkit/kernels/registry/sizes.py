"""What decides which kernels the ranks of a deployment compile: sizes that no step and no rank changes.

Everything else (how many tokens, rows and blocks, which rank, how wide the window) is a plain argument, and kernels
are told not to look at its value. One rank's list is therefore every rank's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """The sizes that kernels are compiled with.

    pcp_size, dcp_size, interleave: the topology; interleave in tokens. block_size: tokens of a cache block.
    states: (compress_ratio, states_per_block) of each kind of compressed cache. kpool: rows of a tail block, 0: none.
    swa_block_size: tokens of a block of the window cache, 0: none. draft_blocks: drafts that see each other.
    key_rows: (main bytes, side bytes) of the rows of each latent or window cache (latent_cache.py). index_dim: values
    of an indexer key, 0: no indexer; index_dtypes: what its keys and queries come as, bf16, fp16 or fp32; pow2_scales:
    theirs are rounded up to powers of two. index_heads: heads whose scores its kernels sum, 0: it is scored elsewhere;
    index_topk: keys that a token keeps; query_tokens: most query tokens of a decode row whose pages are read once.
    symmetric: key gathers read the peers' memory (comm/symmetric.py).
    """

    block_size: int
    pcp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1
    states: tuple[tuple[int, int], ...] = ()
    kpool: int = 0
    swa_block_size: int = 0
    draft_blocks: bool = False
    key_rows: tuple[tuple[int, int], ...] = ()
    index_dim: int = 0
    index_dtypes: tuple[str, ...] = ("bf16",)
    pow2_scales: bool = False
    index_heads: int = 0
    index_topk: int = 2048
    query_tokens: int = 1
    symmetric: bool = False

    @property
    def gathers_shards(self) -> bool:
        """An all-gather brings the keys of all DCP ranks together, rank after rank."""
        return self.pcp_size > 1 and self.dcp_size > 1 and not self.symmetric

    def ratios(self) -> list[int]:
        """Compress ratios of its caches, 1 (uncompressed keys) among them."""
        return sorted({1, *(ratio for ratio, _ in self.states)})


SAMPLES = {
    "one-rank": KernelSizes(
        block_size=64,
        states=((4, 64), (128, 2)),
        kpool=16,
        swa_block_size=64,
        draft_blocks=True,
        key_rows=((576, 8),),
        index_dim=128,
        index_dtypes=("bf16", "fp16", "fp32"),
        pow2_scales=True,
    ),
    "sharded": KernelSizes(
        block_size=64,
        pcp_size=8,
        dcp_size=8,
        interleave=256,
        states=((4, 64),),
        swa_block_size=64,
        key_rows=((656, 0), (576, 8)),
        index_dim=128,
        symmetric=True,
    ),
    "gathered": KernelSizes(block_size=64, pcp_size=2, dcp_size=2, key_rows=((656, 0),), index_dim=128),
    "odd": KernelSizes(
        block_size=100,
        dcp_size=5,
        interleave=21,
        states=((3, 7),),
        swa_block_size=100,
        key_rows=((20, 12),),
        index_dim=36,
    ),
}
"""Deployments whose kernels are compiled ahead of time for every target; one is odd in every number."""
