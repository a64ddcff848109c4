"""What a replay came to."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from cpkit.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class ReplayStats:
    """Counts of a replay so far; of a whole one, every request is finished or refused. Tokens unless said otherwise.

    A replay that ran to its end conserves tokens:

        num_tokens = needed_tokens - prefix_hit_tokens - resumed_hit_tokens + dropped_tokens + rejected_tokens

    needed_tokens: prompts, and outputs but for the last, whose KV nobody reads, of the requests admitted.
    num_tokens: computed, all steps together.
    prompt_tokens, prefix_hit_tokens: prompts of requests when first admitted, and what they found in the cache.
    resumed_hit_tokens: found in the cache when coming back from a preemption.
    dropped_tokens: KV given up in preemptions. rejected_tokens: computed for drafts, not kept.
    refused: number of requests by reason.
    peak_blocks: most blocks in requests' tables at once.
    elapsed_s: end of the last step, on the replay's clock.
    ttft_s, latency_s: [num] float64, seconds from when a request could start to its first output token and to its
        end, in order of req_id; requests that have not come that far are left out.
    queue_s: [num] float64, of it the seconds until it was first admitted. tpot_s: [num] float64, seconds from a
        request's first output token to its last, over the tokens behind the first; requests with one are left out.
    output_tokens: given so far, of unfinished requests too.
    """

    num_requests: int
    num_finished: int
    refused: dict[str, int]
    num_steps: int
    num_tokens: int
    needed_tokens: int
    prompt_tokens: int
    prefix_hit_tokens: int
    resumed_hit_tokens: int
    dropped_tokens: int
    rejected_tokens: int
    num_preemptions: int
    peak_blocks: int
    elapsed_s: float
    ttft_s: FloatArray
    latency_s: FloatArray
    queue_s: FloatArray
    tpot_s: FloatArray
    output_tokens: int

    @property
    def num_refused(self) -> int:
        """Requests that could never fit."""
        return sum(self.refused.values())

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that the cache held when the request was first admitted."""
        return self.prefix_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True, eq=False)
class Tally:
    """The same counts while the replay runs, under the same names, and the times of each request (NaN: not yet).

    output_len: [num_requests] int64, tokens that each asks for.
    """

    output_len: IntArray
    admitted_s: FloatArray = field(init=False)
    first_token_s: FloatArray = field(init=False)
    finish_s: FloatArray = field(init=False)
    refused: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_tokens: int = 0
    needed_tokens: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    dropped_tokens: int = 0
    rejected_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    peak_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("admitted_s", "first_token_s", "finish_s"):
            setattr(self, name, np.full(len(self.output_len), np.nan))

    def stats(self, ready_s: FloatArray, elapsed_s: float) -> ReplayStats:
        """The counts as they stand, with waits measured from ready_s [num_requests]."""
        ttft_s, latency_s = self.first_token_s - ready_s, self.finish_s - ready_s
        queue_s, finished = self.admitted_s - ready_s, np.isfinite(self.finish_s)
        several = finished & (self.output_len > 1)
        tpot_s = (self.finish_s[several] - self.first_token_s[several]) / (self.output_len[several] - 1)
        return ReplayStats(
            num_requests=len(ready_s),
            num_finished=int(np.count_nonzero(finished)),
            refused=dict(self.refused),
            num_steps=self.num_steps,
            num_tokens=self.num_tokens,
            needed_tokens=self.needed_tokens,
            prompt_tokens=self.prompt_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            resumed_hit_tokens=self.resumed_hit_tokens,
            dropped_tokens=self.dropped_tokens,
            rejected_tokens=self.rejected_tokens,
            num_preemptions=self.num_preemptions,
            peak_blocks=self.peak_blocks,
            elapsed_s=elapsed_s,
            ttft_s=ttft_s[np.isfinite(ttft_s)],
            latency_s=latency_s[np.isfinite(latency_s)],
            queue_s=queue_s[np.isfinite(queue_s)],
            tpot_s=tpot_s,
            output_tokens=self.output_tokens,
        )
