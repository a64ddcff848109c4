"""Seconds of the kernels of a layer on a chip: from tables of measured times, else by roofline.

roofline      max(flops / peak, bytes / bandwidth) + least time of a kernel
in a table    what was measured, read between points
outside it    measured at its nearest edge x roofline(asked) / roofline(edge): 'calibrated'; so are other head
              counts, and chips without a table, which borrow the H200's. Never below the floor: flops at the peak,
              bytes at the share of the bandwidth that reading reaches (small shapes were measured out of the L2)
no table      roofline at an assumed share of the peaks: 'hardware'
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from cpkit.errors import ConfigError
from cpkit.sizing.chips import Chip, chip
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.tables import KernelTable, kernel_tables, table_origins
from cpkit.sizing.figures import Figure

BLACKWELL_HEADS = 128
"""Heads that FlashMLA's sparse prefill computes on Blackwell at least: with 64 it takes as long on B200 as on H200."""

Work = Callable[[float, float, int], tuple[float, float]]
"""Flops and bytes of a kernel from query rows, keys a row, and heads."""


WIDER = {"fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16"), "bf16": ("bf16",)}
"""What products of a dtype run as, the first that a chip has."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with a table: its name there, heads that it was measured with, its operands' dtype, and its work."""

    name: str
    heads: int
    dtype: str
    work: Work


def logits_work(rows: float, keys: float, heads: int) -> tuple[float, float]:
    """fp8 queries of 128 values against keys that tiles share; fp32 logits out."""
    return 2 * rows * keys * heads * 128, rows * (4 * keys + 128 * heads)


def decode_logits_work(rows: float, keys: float, heads: int) -> tuple[float, float]:
    """The same where every row has keys of its own, 132 bytes each."""
    return 2 * rows * keys * heads * 128, rows * keys * (132 + 4)


def topk_work(rows: float, keys: float, heads: int) -> tuple[float, float]:
    """fp32 logits in; heads is 1."""
    return 0.0, 4 * rows * keys * heads


def prefill_attention_work(rows: float, keys: float, heads: int) -> tuple[float, float]:
    """bf16 products of 576 and 512 values over rows that heads share."""
    return 2 * rows * keys * heads * 1088, 2 * 576 * rows * keys / 8


def decode_attention_work(rows: float, keys: float, heads: int) -> tuple[float, float]:
    """The same over fp8 rows of 656 bytes that no other query reads."""
    return 2 * rows * keys * heads * 1088, 656 * rows * keys


def window_work(rows: float, keys: float, heads: int) -> tuple[float, float]:
    """K = V of 512 values: bf16 products over fp8 rows of 584 bytes."""
    return 2 * rows * keys * heads * 1024, 584 * rows * keys / 8


def window_decode_work(rows: float, keys: float, heads: int) -> tuple[float, float]:
    """The same, each row with keys of its own."""
    return 2 * rows * keys * heads * 1024, 584 * rows * keys


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("mqa_logits", 32, "fp8", logits_work),
        Kernel("mqa_logits_decode", 64, "fp8", decode_logits_work),
        Kernel("topk_512", 1, "bf16", topk_work),
        Kernel("topk_512_decode", 1, "bf16", topk_work),
        Kernel("topk_2048", 1, "bf16", topk_work),
        Kernel("topk_2048_decode", 1, "bf16", topk_work),
        Kernel("sparse_prefill", 64, "bf16", prefill_attention_work),
        Kernel("sparse_decode", 128, "bf16", decode_attention_work),
        Kernel("window_prefill", 64, "bf16", window_work),
        Kernel("window_decode", 64, "bf16", window_decode_work),
    )
}
"""Heads: of the indexer of the models that were measured (GLM-5: 32, V4-Flash: 64), and attention heads padded."""


@dataclass(frozen=True, slots=True)
class Source:
    """A table, the heads and the chip that it was measured with, and what is said of a time in it or scaled from it."""

    table: KernelTable
    heads: int
    chip: Chip
    said: str
    scaled: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaled", f"{self.said}, scaled by roofline")


@dataclass(frozen=True)
class Kernels:
    """Kernels of one chip under given assumptions.

    own: tables that take the place of the shipped ones, each with the heads it was measured with on this chip.
    """

    chip: Chip
    assumptions: Assumptions
    own: Mapping[str, tuple[KernelTable, int]] = field(default_factory=dict, hash=False)

    @cached_property
    def head_tile(self) -> int:
        """Heads that attention kernels work on at least."""
        return self.assumptions.head_tile or (64 if self.chip.is_nvidia else 16)

    @cached_property
    def peaks_source(self) -> str:
        """What is said of a time that rests on the chip's peaks."""
        return f"peaks of {self.chip.name}, at assumed shares of them"

    @cached_property
    def peaks(self) -> dict[str, float]:
        """Peak flops of the chip by dtype."""
        return {dtype: peak(self.chip, dtype) for dtype in WIDER}

    @cached_property
    def _tables(self) -> dict[str, "Source"]:
        """The table of each kernel: one that was given, else the chip's own, else the H200's."""
        shipped, other = kernel_tables(self.chip.name), kernel_tables("h200")
        found = {}
        for name, kernel in KERNELS.items():
            if name in self.own:
                table, heads = self.own[name]
                found[name] = Source(table, heads, self.chip, f"{name} of cpkit on {self.chip.name}")
                continue
            where = self.chip if name in shipped else chip("h200")
            heads = BLACKWELL_HEADS if name == "sparse_prefill" and where.is_blackwell else kernel.heads
            said = f"{name} on {where.name} ({table_origins(where.name)[name]})"
            found[name] = Source((shipped if name in shipped else other)[name], heads, where, said)
        return found

    def padded_heads(self, name: str, heads: int) -> int:
        """Heads that an attention kernel computes for a rank's: tile, twice the tile, then multiples of that.

        tile 64:    8 -> 64    64 -> 64    65 -> 128    130 -> 256
        """
        tile = self.head_tile
        if name == "sparse_prefill" and self.chip.is_blackwell and self.assumptions.head_tile is None:
            heads = max(heads, BLACKWELL_HEADS)
        return tile if heads <= tile else -(-heads // (2 * tile)) * 2 * tile

    def seconds(self, name: str, rows: float, keys: float, heads: int = 1) -> Figure:
        """One launch of a kernel of KERNELS over rows > 0 that see keys > 0 each."""
        kernel, source = KERNELS[name], self._tables[name]
        reading = source.table.read(rows, keys)
        if reading.inside and heads == source.heads and source.chip is self.chip:
            return Figure(reading.seconds, "measured", source.said)
        asked = self.roofline(*kernel.work(rows, keys, heads), kernel.dtype, self.chip)
        edge = self.roofline(*kernel.work(reading.rows, reading.keys, source.heads), kernel.dtype, source.chip)
        scaled = reading.seconds * asked / edge
        if not reading.inside:
            flops, num_bytes = kernel.work(rows, keys, heads)
            scaled = max(scaled, flops / self.peaks[kernel.dtype], self.copy(num_bytes, launches=0))
        return Figure(scaled, "calibrated", source.scaled)

    def topk_seconds(self, k: int, rows: float, keys: float, *, decode: bool = False) -> Figure:
        """Top-k of rows over keys, read from the nearer of the two k that were measured."""
        near = 512 if k <= 512 else 2048
        figure = self.seconds(f"topk_{near}{'_decode' if decode else ''}", rows, keys)
        return figure if k == near else replace(figure, kind="calibrated", source=f"{figure.source}, for k={k}")

    def roofline(self, flops: float, num_bytes: float, dtype: str, on: Chip) -> float:
        """Least seconds of a kernel on a chip, at its peaks."""
        moved = num_bytes / on.hbm_bandwidth.value
        return max(flops / peak(on, dtype), moved) + self.assumptions.kernel_s

    def product(self, flops: float, weight_bytes: float, share: float, dtype: str, launches: int = 1) -> float:
        """Seconds of matrix products that read weights once, at shares of the peaks."""
        memory_s = weight_bytes / (self.chip.hbm_bandwidth.value * self.assumptions.memory_share)
        return max(flops / (self.peaks[dtype] * share), memory_s) + launches * self.assumptions.kernel_s

    def copy(self, num_bytes: float, launches: int = 1) -> float:
        """Seconds of kernels that only move bytes."""
        moved = num_bytes / (self.chip.hbm_bandwidth.value * self.assumptions.memory_share)
        return moved + launches * self.assumptions.kernel_s


def peak(on: Chip, dtype: str) -> float:
    """Peak flops of a chip for a dtype; one it lacks runs as the next wider it has. Raises ConfigError."""
    for wider in WIDER[dtype]:
        if wider in on.peak_flops:
            return on.peak_flops[wider].value
    raise ConfigError(f"{on.name}: no peak for {dtype} is recorded")
