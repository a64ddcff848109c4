"""Which of several kernels for the same work a device runs: Hopper has logits kernels of its own, all NVIDIA GPUs have
a top-k of their own, and every other device takes the portable ones.
"""

from typing import Literal

import torch

GpuKind = Literal["hopper", "nvidia", "other"]


def gpu_kind(device: torch.device) -> GpuKind:
    """hopper: compute capability 9.0; nvidia: the others of its maker; other: anything else, a CPU too."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "other"
    return "hopper" if torch.cuda.get_device_capability(device) == (9, 0) else "nvidia"
