"""What builders must know of a chip: which decode kernels it has, and how many workers share a tile schedule."""

from dataclasses import dataclass

import torch

from cpkit.errors import ConfigError

HOPPER, BLACKWELL = 90, 100
"""CUDA families of datacenter chips; 120 is consumer Blackwell, which has none of their decode kernels."""

PLATFORMS = ("cuda", "rocm", "xpu", "cpu")


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator, by what its kernels take.

    platform: one of PLATFORMS. family: CUDA compute capability, rounded down to tens (80, 90, 100, 120); None
    elsewhere. cdna: ROCm generation (CDNA4 is 4), None elsewhere. kernel_library: ROCm's tuned kernel library is
    enabled. num_workers: programs (SMs) that a decode kernel is spread over.
    """

    platform: str
    family: int | None = None
    cdna: int | None = None
    kernel_library: bool = False
    num_workers: int = 1

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise ConfigError(f"platform {self.platform!r}: use one of {', '.join(PLATFORMS)}")
        if (self.platform == "cuda") != (self.family is not None):
            raise ConfigError(f"platform {self.platform!r} with family={self.family}: CUDA chips have one, others none")
        if self.family is not None and self.family % 10:
            raise ConfigError(f"family={self.family}: it is rounded down to tens; pass {self.family // 10 * 10}")
        if self.num_workers < 1:
            raise ConfigError(f"num_workers={self.num_workers}: at least one program runs a kernel")

    @property
    def decodes_any_length(self) -> bool:
        """Its decode kernel takes rows of one query token that name their request: any query length, no padding."""
        return self.family == BLACKWELL

    def has_native_width(self, num_tokens: int) -> bool:
        """Its decode kernel takes rows of this many query tokens."""
        if num_tokens <= 1 or self.family == BLACKWELL:
            return True
        return num_tokens in ((2, 4) if self.family == HOPPER else (2,))

    @property
    def takes_window_schedules(self) -> bool:
        """Its sliding-window decode kernels read a tile schedule."""
        return self.platform not in ("rocm", "xpu") and self.family != 120


def chip_of(device: torch.device) -> Chip:
    """The chip behind a device; ROCm needs its generation named by hand."""
    if device.type == "cuda" and torch.version.hip is None:
        facts = torch.cuda.get_device_properties(device)
        return Chip("cuda", family=facts.major * 10, num_workers=facts.multi_processor_count)
    if device.type == "cuda":
        raise ConfigError("a ROCm device does not tell its generation: pass Chip('rocm', cdna=..., num_workers=...)")
    if device.type == "xpu":
        raise ConfigError("an XPU device does not tell its workers: pass Chip('xpu', num_workers=...)")
    return Chip("cpu")
