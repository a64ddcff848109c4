"""Seconds of the kernels of a layer on a chip: from tables of measured times, else by roofline.

roofline      max(flops / peak, bytes / bandwidth) + least time of a kernel
in a table    what was measured, read between points
outside it    measured at its nearest edge x roofline(asked) / roofline(edge): 'calibrated'; so are other head
              counts, and chips without a table, which borrow the H200's
no table      roofline at an assumed share of the peaks: 'hardware'
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from cpkit.errors import ConfigError
from cpkit.sizing.chips import Chip, chip
from cpkit.sizing.cost_assumptions import Assumptions
from cpkit.sizing.figures import Figure
from cpkit.sizing.tables import KernelTable, kernel_tables

BLACKWELL_HEADS = 128
"""Heads that FlashMLA's sparse prefill computes on Blackwell at least: with 64 it takes as long on B200 as on H200."""

VENDOR = "aiconfigurator-core 0.12.0"
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


@dataclass(frozen=True)
class Kernels:
    """Kernels of one chip under given assumptions."""

    chip: Chip
    assumptions: Assumptions

    @cached_property
    def head_tile(self) -> int:
        """Heads that attention kernels work on at least."""
        return self.assumptions.head_tile or (64 if self.chip.is_nvidia else 16)

    @cached_property
    def peaks(self) -> dict[str, float]:
        """Peak flops of the chip by dtype."""
        return {dtype: peak(self.chip, dtype) for dtype in WIDER}

    @cached_property
    def _tables(self) -> dict[str, tuple[KernelTable, Chip]]:
        """The table of each kernel and the chip it was measured on: the chip's own, else the H200's."""
        own, other = kernel_tables(self.chip.name), kernel_tables("h200")
        lent = chip("h200")
        return {name: (own[name], self.chip) if name in own else (other[name], lent) for name in KERNELS}

    @cached_property
    def _sources(self) -> dict[str, tuple[str, str]]:
        """What is said of each kernel read inside its table, and of one scaled from it."""
        said = {}
        for name, (_, where) in self._tables.items():
            table = f"{name} on {where.name} ({'this project' if name == 'sparse_decode' else VENDOR})"
            said[name] = table, f"{table}, scaled by roofline"
        return said

    def padded_heads(self, name: str, heads: int) -> int:
        """Heads that an attention kernel computes for a rank's: tile, twice the tile, then multiples of that.

        tile 64:    8 -> 64    64 -> 64    65 -> 128    130 -> 256
        """
        tile = self.head_tile
        if name == "sparse_prefill" and self.chip.is_blackwell and self.assumptions.head_tile is None:
            heads = max(heads, BLACKWELL_HEADS)
        return tile if heads <= tile else -(-heads // (2 * tile)) * 2 * tile

    def _measured_heads(self, kernel: Kernel, where: Chip) -> int:
        """Heads that a table's kernel computed."""
        return BLACKWELL_HEADS if kernel.name == "sparse_prefill" and where.is_blackwell else kernel.heads

    def seconds(self, name: str, rows: float, keys: float, heads: int = 1) -> Figure:
        """One launch of a kernel of KERNELS over rows > 0 that see keys > 0 each."""
        kernel = KERNELS[name]
        table, where = self._tables[name]
        reading = table.read(rows, keys)
        inside, scaled = self._sources[name]
        measured_heads = self._measured_heads(kernel, where)
        if reading.inside and heads == measured_heads and where is self.chip:
            return Figure(reading.seconds, "measured", inside)
        asked = self.roofline(*kernel.work(rows, keys, heads), kernel.dtype, self.chip)
        edge = self.roofline(*kernel.work(reading.rows, reading.keys, measured_heads), kernel.dtype, where)
        return Figure(reading.seconds * asked / edge, "calibrated", scaled)

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
