"""The paged caches of one layer on one rank, and the row formats that they hold.

    latent    keys of the sharded cache, block_size / ratio a block          every layer but swa
    index     indexer keys, block_size / their own ratio a block             layers that run their indexer
    window    newest tokens, replicated: block_size a block, dcp blocks a block id      layers with a window

A fresh cache is all 0xff bytes, NaN in every format: a key that is read before it is written shows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from cpkit.errors import ConfigError
from cpkit.kernels.index_cache import gather_index_keys, quantize_index_keys
from cpkit.kernels.latent_cache import (
    V4_BYTES,
    V4_DIM,
    V32_BYTES,
    V32_DIM,
    V32_FP8,
    gather_v4_rows,
    gather_v32_rows,
    insert_v4_rows,
    insert_v32_rows,
    pack_v4_rows,
    pack_v32_rows,
    unpack_v4_rows,
    unpack_v32_rows,
)
from cpkit.layers import Layer
from cpkit.topology import Topology

UNWRITTEN = 0xFF
"""Byte of fresh cache memory."""


class _Insert(Protocol):
    def __call__(
        self, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, block_size: int, backend: str
    ) -> None: ...


class _Gather(Protocol):
    def __call__(self, cache: torch.Tensor, slots: torch.Tensor, *, block_size: int, backend: str) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a key of `dim` values becomes a cache row of `row_bytes` bytes, and back up to fp8 rounding."""

    name: str
    dim: int
    row_bytes: int
    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor], torch.Tensor]
    insert: _Insert
    gather: _Gather


V32 = RowFormat("fp8 656", V32_DIM, V32_BYTES, pack_v32_rows, unpack_v32_rows, insert_v32_rows, gather_v32_rows)
V32_NO_ROPE = RowFormat(
    "fp8 656",
    V32_FP8,
    V32_BYTES,
    lambda latent: pack_v32_rows(torch.nn.functional.pad(latent, (0, V32_DIM - V32_FP8))),
    lambda rows: unpack_v32_rows(rows)[:, :V32_FP8],
    insert_v32_rows,
    gather_v32_rows,
)
"""Of a model whose keys have no rope part: the same row, which keeps zeros there."""
V4 = RowFormat("fp8 584", V4_DIM, V4_BYTES, pack_v4_rows, unpack_v4_rows, insert_v4_rows, gather_v4_rows)
KINDS = {"dsa": (V32, V32_NO_ROPE), "c4a": (V4,), "c128a": (V4,), "swa": (V4,)}
"""Kinds of layers that the program runs, and the formats that their rows may have."""


def row_format(layer: Layer) -> RowFormat:
    """The format of a layer's rows; raises ConfigError for a layer that the program cannot run."""
    rows = {(layer.key_dim, layer.key_bytes)} if layer.compress_ratio else set()
    rows |= {(layer.window_dim, layer.window_bytes)} if layer.window_size else set()
    for form in KINDS.get(layer.kind, ()):
        if rows == {(form.dim, form.row_bytes)} and layer.owns_keys:
            return form
    known = ", ".join(
        f"{kind} ({form.dim} values in {form.row_bytes} bytes)" for kind, forms in KINDS.items() for form in forms
    )
    raise ConfigError(f"{layer.kind} with rows of {sorted(rows)} (values, bytes): the rank program runs {known}")


@dataclass(frozen=True, slots=True, eq=False)
class LayerCaches:
    """Pages of one layer on one rank.

    states_per_block, index_block: keys of a latent and of an index block (without an indexer as many).
    window_block: tokens of a window block.
    latent, index, window: [blocks, page bytes] uint8, None where the layer has none.
    backend: of the kernels that write, read and find rows, torch or triton.
    """

    layer: Layer
    form: RowFormat
    states_per_block: int
    index_block: int
    window_block: int
    latent: torch.Tensor | None
    index: torch.Tensor | None
    window: torch.Tensor | None
    backend: str

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied with: the values of a key to the power -1/2."""
        return 1 / math.sqrt(self.form.dim)

    @property
    def value_dim(self) -> int:
        """Leading values of a key that attention sums."""
        return self.layer.value_dim or self.form.dim

    @property
    def num_latent_slots(self) -> int:
        """Slots of the latent cache."""
        return len(self.latent) * self.states_per_block if self.latent is not None else 0

    @property
    def num_window_slots(self) -> int:
        """Slots of the window cache."""
        return len(self.window) * self.window_block if self.window is not None else 0

    def insert_latent(self, latent: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys [n, dim] to their slots [n] int64, -1 for none."""
        assert self.latent is not None, "swa layers keep no latent cache"
        self._insert(self.latent, latent, slots, self.states_per_block)

    def insert_index(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Write indexer keys [n, head_dim] to their slots."""
        assert self.index is not None, "only layers that run their indexer keep its keys"
        quantize_index_keys(self.index, keys, slots, block_size=self.index_block, backend=self.backend)

    def insert_window(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write window keys [n, dim] to their slots."""
        assert self.window is not None, "only layers with a window keep it"
        self._insert(self.window, rows, slots, self.window_block)

    def latent_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, row_bytes] uint8, packed keys in the slots, zeros for -1."""
        assert self.latent is not None, "swa layers keep no latent cache"
        return self.form.gather(self.latent, slots, block_size=self.states_per_block, backend=self.backend)

    def window_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, row_bytes] uint8, packed window keys in the slots, zeros for -1."""
        assert self.window is not None, "only layers with a window keep it"
        return self.form.gather(self.window, slots, block_size=self.window_block, backend=self.backend)

    def index_keys(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """fp8 values [n, head_dim] and fp32 scales [n] of the indexer keys in the slots."""
        assert self.index is not None and self.layer.index is not None, "checked by the caller"
        sizes = {"block_size": self.index_block, "dim": self.layer.index.head_dim}
        return gather_index_keys(self.index, slots, **sizes, backend=self.backend)

    def _insert(self, cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, block_size: int) -> None:
        kept = slots >= 0
        rows = self.form.pack(keys[kept])
        self.form.insert(cache, rows, slots[kept], block_size=block_size, backend=self.backend)


def make_caches(
    layer: Layer, topology: Topology, num_blocks: int, device: torch.device, *, backend: str
) -> LayerCaches:
    """Fresh caches of a layer; num_blocks: block ids of the pool, the null block included. Raises ConfigError."""
    form = row_format(layer)
    states = topology.block_size // layer.compress_ratio if layer.compress_ratio else 0
    index_block = topology.block_size // layer.chunk_ratio if layer.chunk_ratio else 0

    def pages(blocks: int, page_bytes: int) -> torch.Tensor | None:
        return torch.full((blocks, page_bytes), UNWRITTEN, dtype=torch.uint8, device=device) if page_bytes else None

    index_bytes = layer.index.key_bytes if layer.index and layer.runs_index else 0
    window_bytes = topology.block_size * form.row_bytes if layer.window_size else 0
    return LayerCaches(
        layer=layer,
        form=form,
        states_per_block=states,
        index_block=index_block,
        window_block=topology.block_size,
        latent=pages(num_blocks, states * form.row_bytes),
        index=pages(num_blocks, index_block * index_bytes),
        window=pages(num_blocks * topology.dcp, window_bytes),
        backend=backend,
    )
