"""What an engine's layer takes beside the kernels that the model of time knows: fitted to measured decode blocks.

The model's own small kernels were fitted to SGLang's blocks, whose layer is fused best. vLLM's takes longer by a
constant and by a little for each row, whatever the model, the heads of a rank and the context: launches that are not
fused and passes over hidden rows, not a slower attention.

    decode block = the model's stages + layer_s + decode_row_s x rows

Fitted to DeepSeek-V3.2's blocks (1 to 1,024 rows, 1 to 128 heads a rank, contexts of 2 to 131,072), judged on GLM-5's;
docs/cost-model.md has both. Rows of prefills were not measured: they are given none.
"""

from dataclasses import dataclass

from cpkit.errors import ConfigError
from cpkit.sizing.deployment import ENGINES
from cpkit.sizing.figures import Figure


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Seconds of one layer: of any step, and of each decode row beside. source: what they were fitted to."""

    layer_s: float
    decode_row_s: float
    source: str

    def seconds(self, decode_rows: int) -> Figure:
        """What a layer takes beside its kernels."""
        return Figure(self.layer_s + self.decode_row_s * decode_rows, "calibrated", self.source)


ENGINE_TIMES = {
    "vllm": EngineTime(
        75e-6, 0.21e-6, "decode blocks of vllm 0.24.0 on H200 (aiconfigurator-core 0.12.0), fitted to deepseek-v3.2"
    )
}
"""Engines whose layer was seen to take longer than the model's kernels."""


def time_of_engine(engine: str | None) -> EngineTime | None:
    """What is added for an engine; None: nothing. Raises ConfigError for one that is not known."""
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"engine={engine!r}: use one of {', '.join(ENGINES)}")
    return ENGINE_TIMES.get(engine) if engine is not None else None
