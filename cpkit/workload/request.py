"""What a trace holds: requests with lengths, arrival times and prefix hashes, and no text."""

from dataclasses import dataclass, field

import numpy as np

from cpkit.arrays import MAX_LEN, Int32Array, seal
from cpkit.errors import InputError

NO_HASHES: Int32Array = seal(np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace: how much it asks for, when it may start, and which prefix it shares.

    It may start at arrival_s, and not before the request it depends on has finished and think_time_s has passed:
    `start = max(arrival_s, finish(depends_on) + think_time_s)`. Turns of a session have arrival_s = 0.

    prompt_len, output_len: tokens. The token that the prefill ends with is the first output token, so an output of 0
        or 1 tokens is a prefill alone.
    block_hashes: [num_hashes] int32, names of the prompt's leading runs of hash_block_size tokens; equal names mean
        equal tokens. The last run may be cut short by the end of the prompt; a tail without a name is shared with
        nobody.
    session: the conversation it is a turn of, or None.
    Raises InputError.
    """

    req_id: int
    arrival_s: float
    prompt_len: int
    output_len: int
    block_hashes: Int32Array = field(default_factory=lambda: NO_HASHES)
    hash_block_size: int = 512
    session: str | None = None
    depends_on: int | None = None
    think_time_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt_len", "output_len"):
            if not 0 <= getattr(self, name) <= MAX_LEN:
                raise InputError(f"request {self.req_id}: {name}={getattr(self, name)}: a length is between 0 and 2^40")
        if not (0 <= self.arrival_s < np.inf and 0 <= self.think_time_s < np.inf):
            raise InputError(
                f"request {self.req_id}: arrival_s={self.arrival_s}, think_time_s={self.think_time_s}: times are "
                "finite and not negative"
            )
        if self.hash_block_size < 1 or (len(self.block_hashes) - 1) * self.hash_block_size >= self.prompt_len:
            raise InputError(
                f"request {self.req_id}: {len(self.block_hashes)} hashes of {self.hash_block_size} tokens for a prompt "
                f"of {self.prompt_len}: each hash covers at least one prompt token"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order they were recorded; request i has req_id i and depends on an earlier one, if on any.

    format: what the file was recognised as. num_skipped: records left out as malformed. notes: what the reader had to
    decide, one sentence each. Raises InputError.
    """

    name: str
    format: str
    requests: tuple[Request, ...]
    num_skipped: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for i, request in enumerate(self.requests):
            if request.req_id != i:
                raise InputError(f"{self.name}: request {i} has req_id {request.req_id}: ids count from 0 in order")
            if request.depends_on is not None and not 0 <= request.depends_on < i:
                raise InputError(
                    f"{self.name}: request {i} depends on {request.depends_on}: a request depends on an earlier one"
                )
