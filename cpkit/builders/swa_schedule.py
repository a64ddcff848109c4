"""Tile schedules of the window layers' decode kernels: one for each type of layer, balanced by the keys it reads.

ratio    type       keys of a decode token
0 or 1   swaonly    its window
2, 4     c2a, c4a   its window, and the compressed keys that the indexer picks
128      c128a      its window, and all compressed keys
"""

from dataclasses import dataclass

import torch

from cpkit.builders.buffers import Buffer
from cpkit.errors import ConfigError
from cpkit.kernels.swa_indices import WindowTokens
from cpkit.kernels.tile_schedule import tile_schedule

RATIOS = {"swaonly": 1, "c2a": 2, "c4a": 4, "c128a": 128}
PICKED = ("c2a", "c4a")
"""Types of layers whose indexer picks compressed keys."""


def layer_types(compress_ratios: tuple[int, ...] | None) -> tuple[str, ...]:
    """Types of the layers with these ratios, each once, window-only layers first; raises ConfigError for others."""
    ratios = {max(ratio, 1) for ratio in ((1,) if compress_ratios is None else compress_ratios)}
    if unknown := sorted(ratios - set(RATIOS.values())):
        raise ConfigError(f"compress ratios {unknown}: window layers have ratio 0 or 1 (window only), 2, 4 or 128")
    return tuple(name for name, ratio in RATIOS.items() if ratio in ratios)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleStage:
    """Builds the schedules of the layer types present, each in its own part of the buffer."""

    types: tuple[str, ...]
    block_size: int
    index_topk: int | None
    buffer: Buffer
    backend: str

    def build(self, tokens: WindowTokens, window_lens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fresh schedules over the decode tokens; window_lens: [num_decode_tokens] int32."""
        num_tokens = window_lens.numel()
        if not num_tokens:
            return {}
        req = tokens.token_to_req[:num_tokens]
        context = torch.where(tokens.is_valid[:num_tokens], tokens.seq_lens[req], 0)
        schedules = {}
        for name, out in zip(self.types, self.buffer.tensor, strict=False):
            num_keys = window_lens
            if name != "swaonly":
                compressed = context // RATIOS[name]
                if name in PICKED and self.index_topk is not None:
                    compressed = compressed.clamp(max=self.index_topk)
                num_keys = window_lens + compressed
            tile_schedule(num_keys, tile=self.block_size, out=out, backend=self.backend)
            schedules[name] = out
        return schedules
