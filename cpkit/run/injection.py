"""Faults that a run can be asked for: their names, and how they are written. No numpy, so that --help can list them.

KIND@rank=R,step=S            dropped-request@rank=2,step=1
stopped@rank=R,step=S,seconds=T
"""

import math
from dataclasses import dataclass

from cpkit.errors import InputError

PLANNED = {
    "stale-seq-len": "one request's length is one off, as in a batch of the step before",
    "dropped-request": "the last request is missing",
    "extra-request": "the last request is there twice",
    "reordered-requests": "two requests have changed places",
    "other-interleave": "another KV interleave",
    "other-block-size": "another KV block size",
    "other-partition": "another partition of the query tokens",
    "other-budget": "a smaller prefill workspace",
}
"""Kinds that give the rank another batch or other settings, and which."""

KINDS = {
    **PLANNED,
    "early-return": "the rank leaves the step at its beginning, as one that finds no tokens of its own",
    "skipped-collective": "the first collective of the step is not entered",
    "wrong-dtype": "the first collective of the step is entered with another dtype",
    "killed": "SIGKILL; a simulated rank, which is a thread, never comes again",
    "stopped": "SIGSTOP for seconds=T; a simulated rank sleeps",
}
"""Every kind, and what the rank does, or has been given, at that step."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault of one rank at one step. seconds: of stopped."""

    kind: str
    rank: int
    step: int
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Injection":
        """From KIND@rank=R,step=S; raises InputError."""
        kind, _, rest = text.partition("@")
        if kind not in KINDS:
            raise InputError(f"--inject {text}: no kind {kind!r}; the kinds are {', '.join(KINDS)}")
        wanted = ("rank", "step", "seconds") if kind == "stopped" else ("rank", "step")
        values = dict(part.partition("=")[::2] for part in rest.split(","))
        try:
            if tuple(sorted(values)) != tuple(sorted(wanted)):
                raise ValueError("the values are others")
            rank, step, seconds = int(values["rank"]), int(values["step"]), float(values.get("seconds", 0))
            if min(rank, step, seconds) < 0 or not math.isfinite(seconds):
                raise ValueError("below 0")
        except ValueError:
            form = ",".join(f"{name}={letter}" for name, letter in zip(wanted, "RST", strict=False))
            raise InputError(f"--inject {text}: write {kind}@{form} with numbers from 0") from None
        return cls(kind, rank, step, seconds)

    def __str__(self) -> str:
        seconds = f",seconds={self.seconds:g}" if self.kind == "stopped" else ""
        return f"{self.kind}@rank={self.rank},step={self.step}{seconds}"
