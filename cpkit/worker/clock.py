"""Seconds that a rank spends in each stage of its program."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STAGES = ("plan", "inputs", "metadata", "write", "gather", "index", "attend", "merge", "restore", "verify")
"""In the order of the program; `gather` is the PCP gather of KV inputs, chunk gathers count with what needs them."""


class StageClock:
    """Adds up wall seconds by stage; on a GPU a stage ends when its work has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside; name: one of STAGES."""
        assert name in STAGES, name
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] += time.perf_counter() - start
