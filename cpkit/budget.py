"""What one step may hold: the limits that decide batching and chunking."""

from dataclasses import dataclass, fields

from cpkit.errors import ConfigError
from cpkit.model import Model

WORKSPACE_MODEL_LENS = 40
"""Default workspace: room for the keys of this many requests of maximal length."""

ACCEPTANCE_RATE = 0.7
"""Chance that a draft token is kept, given that those before it were, where replays are told nothing."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a step.

    workspace_tokens: tokens whose keys a prefill chunk may gather (compressed caches: workspace_tokens // ratio keys),
        and so the size of one workspace. The rank program has two: one is filled while the other is scored.
    logits_bytes: bytes of fp32 indexer logits (query tokens x keys x 4) that one kernel call may write.
    max_num_batched_tokens, max_num_seqs: tokens and requests of a step.
    num_speculative_tokens: draft tokens a decode verifies beside its own; decodes are rows of up to 1 + this many.
    Raises ConfigError.
    """

    workspace_tokens: int
    logits_bytes: int = 512 << 20
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        least = {"num_speculative_tokens": 0, "logits_bytes": 4}
        for field in fields(self):
            value, low = getattr(self, field.name), least.get(field.name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= 1 << 50:
                raise ConfigError(f"{field.name}={value!r}: it is a whole number from {low} to 2^50")

    @property
    def logits(self) -> int:
        """fp32 logits that fit logits_bytes."""
        return self.logits_bytes // 4

    @property
    def decode_threshold(self) -> int:
        """Longest query that still counts as a decode."""
        return 1 + self.num_speculative_tokens

    def workspace_keys(self, compress_ratio: int) -> int:
        """Keys of a cache with this ratio that a chunk may gather."""
        return self.workspace_tokens // compress_ratio


def default_budget(model: Model, **limits: int) -> Budget:
    """A Budget for a model: the defaults, with `limits` (Budget's fields) in their place."""
    return Budget(**{"workspace_tokens": WORKSPACE_MODEL_LENS * model.max_model_len, **limits})
