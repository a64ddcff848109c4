"""One kind of attention layer: which caches it keeps, and what it reads from them."""

from dataclasses import dataclass

RUN_KINDS = ("dsa", "c4a", "c128a", "swa")
"""Kinds of layers that the rank program runs; others are planned and simulated alone."""


@dataclass(frozen=True, slots=True)
class Index:
    """The indexer of a layer, which scores every key and picks the best.

    topk: keys picked; num_heads, head_dim: of the index queries; ratio: tokens per indexer key (a kpool indexer scores
    pools, so its ratio is above the layer's compress_ratio); key_bytes: of a row of the indexer cache, scale included.
    """

    topk: int
    num_heads: int
    head_dim: int
    ratio: int
    key_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A kind of layer and how many of them a model has.

    kind: dsa, c1a, c2a, c4a, c128a, swa or linear.
    compress_ratio: tokens per key of the paged, sharded cache; 0 when the layer reads none.
    key_dim, value_dim, key_bytes: values scored and values summed per key, bytes of its cache row.
    owns_keys: False where an earlier layer's cache is read.
    index: the indexer whose selection the layer attends, None when it attends all keys or none.
    runs_index: False where an earlier layer's selection is used again.
    window_size: newest tokens attended through the replicated sliding-window cache, 0 for none.
    window_dim, window_bytes: values and bytes of a row of that cache.
    """

    kind: str
    num_layers: int
    compress_ratio: int = 0
    key_dim: int = 0
    value_dim: int = 0
    key_bytes: int = 0
    owns_keys: bool = True
    index: Index | None = None
    runs_index: bool = False
    window_size: int = 0
    window_dim: int = 0
    window_bytes: int = 0

    @property
    def owns_index_keys(self) -> bool:
        """The layer writes indexer keys: it runs its indexer and does not read another layer's cache."""
        return self.runs_index and self.owns_keys

    @property
    def pool(self) -> int:
        """Keys of the sharded cache that one indexer key stands for: above 1 where an indexer scores pools of them."""
        return self.index.ratio // self.compress_ratio if self.index else 1

    @property
    def chunk_ratio(self) -> int:
        """Tokens per key that prefill chunks are counted in."""
        return self.index.ratio if self.index else self.compress_ratio

    def bytes_per_token(self) -> float:
        """Bytes of sharded cache one token of context takes in one such layer."""
        total = self.key_bytes / self.compress_ratio if self.compress_ratio and self.owns_keys else 0.0
        if self.index and self.owns_index_keys:
            total += self.index.key_bytes / self.index.ratio
        return total
