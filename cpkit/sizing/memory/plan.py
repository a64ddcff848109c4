"""What one rank's memory holds: weights, buffers, and caches with room for so many tokens.

Bytes a token takes on one rank, over its layers of a kind; dcp=8, deepseek-v3.2 (61 layers of 656 + 132 bytes):

    keys sharded, index keys sharded       61 x 656 / 8 + 61 x 132 / 8      dcp = 8 holds 8.0 times the tokens
    keys sharded, index keys replicated    61 x 656 / 8 + 61 x 132          3.7 times

Latent keys have one head, so TP and PCP ranks outside a DCP group hold them again: what one rank has room for, times
the ranks that share it (dcp), is what the replica has room for.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from cpkit.arrays import ceil_div
from cpkit.budget import Budget
from cpkit.errors import ConfigError
from cpkit.layers import Layer
from cpkit.model import Model
from cpkit.sizing.chips import Chip
from cpkit.sizing.deployment import draft_layer
from cpkit.sizing.figures import Figure
from cpkit.sizing.memory.buffers import Buffer, list_buffers
from cpkit.topology import Topology

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What decides a rank's memory.

    weights: bytes on one rank. utilization: share of the chip's memory that may be used. replicates_index: every rank
    of a DCP group keeps all indexer keys. max_model_len: tokens of the longest request. merge: ag_rs or a2a.
    buffers_beside: the utilization is of weights and caches alone (SGLang's static share); buffers take from the rest.
    num_workspaces: index workspaces at once; cpkit fills the next while it scores one. draft_layers: of draft modules;
    where indexer keys are replicated, so are theirs.
    """

    model: Model
    topology: Topology
    budget: Budget
    chip: Chip
    weights: Figure
    utilization: Figure
    max_model_len: int
    replicates_index: bool = False
    buffers_beside: bool = False
    merge: str = "ag_rs"
    num_workspaces: int = 1
    draft_layers: int = 0


@dataclass(frozen=True, slots=True)
class CacheRow:
    """Caches of one kind of layer on one rank, over all layers of the kind that it has.

    num_layers: of the whole model. keys, index: bytes one token of context takes. window: bytes one request takes,
    whatever its length.
    """

    kind: str
    num_layers: int
    keys: float
    index: float
    window: float

    @property
    def per_token(self) -> float:
        """Bytes of both caches."""
        return self.keys + self.index


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's memory, in bytes, and what it has room for.

    rows: caches by kind of layer. buffers: workspace, logits, and what collectives fill, as if all held at once.
    """

    settings: MemorySettings
    rows: tuple[CacheRow, ...]
    buffers: tuple[Buffer, ...]

    @property
    def usable(self) -> float:
        """Bytes of the chip that may be used."""
        return self.settings.chip.hbm_bytes.value * self.settings.utilization.value

    @property
    def buffer_bytes(self) -> int:
        """All buffers."""
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def room(self) -> float:
        """What weights and buffers (unless these lie beside) leave of the usable bytes, for caches."""
        held = 0 if self.settings.buffers_beside else self.buffer_bytes
        return self.usable - self.settings.weights.value - held

    @property
    def has_room(self) -> bool:
        """A block fits beside the null block."""
        return self.num_blocks >= 2

    @property
    def token_bytes(self) -> float:
        """Bytes on one rank that a token of context takes, over all layers."""
        return sum(row.per_token for row in self.rows)

    @property
    def request_bytes(self) -> float:
        """Bytes on one rank that a request takes beside its tokens: windows."""
        return sum(row.window for row in self.rows)

    @property
    def block_bytes(self) -> float:
        """Bytes on one rank behind one block id, which spans block_size * dcp tokens."""
        return self.settings.topology.virtual_block * self.token_bytes

    @property
    def num_blocks(self) -> int:
        """Block ids, the null block included."""
        return math.floor(self.room / self.block_bytes)

    @property
    def tokens(self) -> int:
        """Tokens of context that one replica has room for; windows are not deducted."""
        return max(self.num_blocks - 1, 0) * self.settings.topology.virtual_block

    @property
    def tokens_per_rank(self) -> int:
        """Keys at ratio 1 that one rank stores of them."""
        return self.tokens // self.settings.topology.dcp

    def requests(self, length: int) -> int:
        """Requests of so many tokens that one replica has room for at once, in whole blocks and with their windows."""
        if length < 1:
            raise ConfigError(f"request length {length}: it is at least 1 token")
        blocks = ceil_div(length, self.settings.topology.virtual_block)
        each: float = blocks * self.block_bytes + self.request_bytes
        return max(math.floor((self.room - self.block_bytes) / each), 0)

    def to_json(self) -> dict[str, Any]:
        """Plain data, in bytes and tokens, with where each given number comes from."""
        given = self.settings
        figures = {"hbm": given.chip.hbm_bytes, "utilization": given.utilization, "weights": given.weights}
        return {
            **{
                name: {"value": figure.value, "kind": figure.kind, "source": figure.source}
                for name, figure in figures.items()
            },
            "caches": [
                {
                    "kind": row.kind,
                    "layers": row.num_layers,
                    "key_bytes_per_token": row.keys,
                    "index_bytes_per_token": row.index,
                    "window_bytes_per_request": row.window,
                }
                for row in self.rows
            ],
            "replicates_index": given.replicates_index,
            "buffers": [{"name": buffer.name, "bytes": buffer.bytes, "why": buffer.why} for buffer in self.buffers],
            "room_bytes": self.room,
            "token_bytes": self.token_bytes,
            "blocks": self.num_blocks,
            "tokens": self.tokens,
            "tokens_per_rank": self.tokens_per_rank,
        }


def plan_memory(settings: MemorySettings) -> Memory:
    """The memory of the rank with most layers; raises ConfigError where weights and buffers leave no room."""
    memory = lay_out(settings)
    check_room(memory)
    return memory


def lay_out(settings: MemorySettings) -> Memory:
    """The memory of the rank with most layers, whether or not it has room; raises ConfigError for no such world."""
    rows = cache_rows(
        settings.model,
        settings.topology,
        replicates_index=settings.replicates_index,
        draft_layers=settings.draft_layers,
    )
    buffers = list_buffers(
        settings.model,
        settings.topology,
        settings.budget,
        max_model_len=settings.max_model_len,
        replicates_index=settings.replicates_index,
        merge=settings.merge,
        num_workspaces=settings.num_workspaces,
    )
    if not 0 < settings.utilization.value <= 1:
        raise ConfigError(f"utilization {settings.utilization.value:g}: a share of the memory is above 0, at most 1")
    memory = Memory(settings, rows, buffers)
    if not memory.token_bytes:
        raise ConfigError(f"{settings.model.name} keeps no paged KV: memory does not limit its tokens")
    return memory


def check_room(memory: Memory) -> None:
    """Refuse memory without room for a block of keys, or for buffers that lie beside; raises ConfigError."""
    settings = memory.settings
    beside = memory.buffer_bytes if settings.buffers_beside else 0
    rest = settings.chip.hbm_bytes.value - memory.usable
    if beside > rest:
        raise ConfigError(
            f"{beside / GIB:.1f} GiB of buffers do not fit the {rest / GIB:.1f} GiB of {settings.chip.name} that the "
            f"share {settings.utilization.value:g} of weights and KV leaves; lower it, or use a smaller workspace"
        )
    if not memory.has_room:
        held = memory.buffer_bytes - beside
        gib = [size / GIB for size in (memory.usable, settings.weights.value, held)]
        raise ConfigError(
            f"no room for KV on {settings.chip.name}: {gib[0]:.1f} GiB usable less {gib[1]:.1f} GiB of weights and "
            f"{gib[2]:.1f} GiB of buffers a rank; use more ranks, a smaller workspace or weights of fewer bits"
        )


def cache_rows(
    model: Model, topology: Topology, *, replicates_index: bool, draft_layers: int = 0
) -> tuple[CacheRow, ...]:
    """Caches by kind of layer on the rank with most layers (num_layers / pp, rounded up), linear layers left out.

    Draft modules come last, all of them on that rank.
    """
    stage = largest_stage(model, topology)
    rows = [
        _row(layer, topology, stage, replicates_index=replicates_index)
        for layer in model.layers
        if layer.compress_ratio or layer.window_size
    ]
    if draft_layers:
        layer = replace(model.layers[draft_layer(model)], num_layers=draft_layers)
        shared = replace(topology, dcp=1) if replicates_index else topology
        rows.append(replace(_row(layer, shared, 1.0, replicates_index=replicates_index), kind="draft"))
    return tuple(rows)


def largest_stage(model: Model, topology: Topology) -> float:
    """Share of the layers that the fullest pipeline stage has."""
    return math.ceil(model.num_layers / topology.pp) / model.num_layers


def _row(layer: Layer, topology: Topology, stage: float, *, replicates_index: bool) -> CacheRow:
    layers = layer.num_layers * stage
    keys = layer.key_bytes / layer.compress_ratio if layer.compress_ratio and layer.owns_keys else 0.0
    index = layer.index.key_bytes / layer.index.ratio if layer.index and layer.owns_index_keys else 0.0
    reuses = layer.index is not None and not layer.runs_index
    return CacheRow(
        kind=layer.kind + (", reused selection" if reuses else "") + ("" if layer.owns_keys else ", reused keys"),
        num_layers=layer.num_layers,
        keys=layers * keys / topology.dcp,
        index=layers * index / (1 if replicates_index else topology.dcp),
        window=layers * window_tokens(layer.window_size, topology.block_size) * layer.window_bytes,
    )


def window_tokens(window_size: int, block_size: int) -> int:
    """Tokens of the blocks that a window lies in at worst, when its last token begins a block.

    window 4, block 4:    .xxx x...    two blocks
    """
    if not window_size:
        return 0
    blocks: int = ceil_div(window_size - 1, block_size) + 1
    return blocks * block_size
