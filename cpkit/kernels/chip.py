"""Which chip a kernel runs on, where several are written for the same work: Hopper has logits kernels of its own,
NVIDIA GPUs have a top-k of their own, and every other GPU takes the portable ones.
"""

from typing import Literal

import torch

Chip = Literal["hopper", "nvidia", "other"]


def chip_of(device: torch.device) -> Chip:
    """hopper: compute capability 9.0; nvidia: the others of its maker; other: anything else, a CPU too."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "other"
    return "hopper" if torch.cuda.get_device_capability(device) == (9, 0) else "nvidia"
