"""What the cost model assumes where nothing was measured: one value, each number with its reason."""

from dataclasses import dataclass, fields

from cpkit.errors import ConfigError

REASONS = {
    "gemm_share": "share of the peak that large products reach; 1,258 of 1,979 TFLOP/s in fp8 at 8,192^3 on an H200",
    "expert_share": "the same for the grouped products of experts, whose groups are uneven",
    "memory_share": "share of the peak bandwidth that reading weights and rows reaches; a copy: 4,280 of 4,800 GB/s",
    "kernel_s": "least time of one kernel inside a CUDA graph",
    "small_kernels": "kernels of a layer beside the others (norms, rotary, ..); fitted to SGLang's decode blocks",
    "row_passes": "hidden rows that they read or write a token: norms 8, quantization 5, products 8, routing 7",
    "head_tile": "heads that the attention kernel pads a rank's heads to; 64, then 128 on NVIDIA (FlashMLA), 16 on AMD",
    "overlap": "share of the collectives that runs behind computation; 0: none of it",
    "step_s": "a step's part that no layer does: scheduling and sampling that are not hidden, launching the graph",
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Shares between 0 and 1, seconds, and counts; REASONS says why each is what it is. Raises ConfigError.

    head_tile: None takes the chip's maker's.
    """

    gemm_share: float = 0.65
    expert_share: float = 0.5
    memory_share: float = 0.85
    kernel_s: float = 3e-6
    small_kernels: int = 14
    row_passes: int = 28
    head_tile: int | None = None
    overlap: float = 0.0
    step_s: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("gemm_share", "expert_share", "memory_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: a share is above 0 and at most 1")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap={self.overlap}: a share is from 0 to 1")
        for name in ("kernel_s", "small_kernels", "row_passes", "step_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ConfigError(f"{name}={getattr(self, name)}: it is not negative")
        if self.head_tile is not None and self.head_tile < 1:
            raise ConfigError(f"head_tile={self.head_tile}: at least 1 head, or None for the chip's maker's")

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, reason) of each, for a report."""
        return [(field.name, f"{getattr(self, field.name)}", REASONS[field.name]) for field in fields(self)]


assert REASONS.keys() == {field.name for field in fields(Assumptions)}
