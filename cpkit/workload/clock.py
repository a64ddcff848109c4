"""How long a step takes: the only thing a replay has to guess.

Replace it with any object that has `step_seconds(batch) -> float`; a measured table makes a better clock.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cpkit.batch import Batch
from cpkit.errors import ConfigError


class Clock(Protocol):
    """Anything that tells a step's duration from its batch."""

    def step_seconds(self, batch: Batch) -> float:
        """Seconds that the step takes: finite, not negative."""
        ...


@dataclass(frozen=True, slots=True)
class StepClock:
    """Seconds of a step = step_s + token_s * query tokens + pair_s * (query token, key) pairs.

    The defaults are of the size of DeepSeek-V3.2 in FP8 on 16 GPUs of the H200 class. They order loads rightly; they
    are no forecast.

        step_s    25 ms    weights read once (about 10 ms), launches and collectives of 61 layers
        token_s   30 us    2 FLOP per active parameter (37 B), at 2.5 PFLOP/s sustained
        pair_s    0.2 ns   indexer: 2 FLOP * 64 heads * 128 wide * 61 layers = 1 MFLOP, at 5 PFLOP/s sustained

    Raises ConfigError.
    """

    step_s: float = 25e-3
    token_s: float = 30e-6
    pair_s: float = 2e-10

    def __post_init__(self) -> None:
        if not (0 < self.step_s < np.inf and 0 <= self.token_s < np.inf and 0 <= self.pair_s < np.inf):
            raise ConfigError(f"{self}: step_s is above 0, the other costs are not negative, all are finite")

    def step_seconds(self, batch: Batch) -> float:
        """Duration of this batch; a query token at position p meets p + 1 keys."""
        query = batch.query_lens.astype(np.float64)
        pairs = query @ (batch.seq_lens - (query - 1) / 2)
        return self.step_s + self.token_s * batch.num_tokens + self.pair_s * float(pairs)
