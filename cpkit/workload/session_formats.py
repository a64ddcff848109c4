"""Traces of agent sessions: turns that wait for the turn before, sub-agents that branch off.

    main      turn 0 ──think──► turn 1 ──────────think──────────► turn 2
    main.0                         └─delay─► turn 0 ─think─► turn 1

Every session starts at 0. A turn starts once the turn before it in its branch has finished and its think time has
passed. A sub-agent's first turn waits for the turn of its parent that was recorded before it, plus the recorded delay.
Recorded start times serve for delays that the trace leaves out, and are otherwise not replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from cpkit.arrays import Int32Array, ceil_div, seal
from cpkit.workload.hash_names import HashNames
from cpkit.workload.request import Request
from cpkit.workload.trace_source import Read, TraceSource, as_length, as_seconds, csv_records, json_field, parse_json

LENGTH_COLUMNS = (
    "session",
    "branch",
    "turn",
    "t_s",
    "input_tokens",
    "output_tokens",
    "hash_blocks",
    "prefix_blocks_of_previous_turn",
    "api_time_s",
    "think_time_s",
)
LENGTHS_HASH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn as recorded: when it started, how long the call took (0 if not recorded), and its place in the trace."""

    index: int
    start_s: float
    call_s: float
    hashes: Int32Array

    def delay_until(self, start_s: float) -> float:
        """Seconds between this turn's answer and a later start, as recorded; never negative."""
        return max(0.0, start_s - self.start_s - self.call_s)


def read_sessions(source: TraceSource, limit: int | None) -> Read:
    """One whole session a line, `id, block_size, hash_id_scope, requests`; entries with requests are sub-agents.

    A session that cannot be read is one bad line, whatever it holds. limit counts requests, so the last session may
    be cut short behind one of its turns.
    """
    names = HashNames()
    requests: list[Request] = []
    first_of_next = 0

    def parse(text: str) -> list[Request]:
        session = _Session(parse_json(text), names, first_of_next)
        session.add_branch(json_field(session.data, "requests"), "requests", None, 0.0)
        return session.requests

    for found in source.records(parse):
        requests += found
        first_of_next = len(requests)
        if limit is not None and first_of_next >= limit:
            break
    return requests[:limit], []


class _Session:
    """Requests of one session, numbered on from first_index."""

    def __init__(self, data: Any, names: HashNames, first_index: int) -> None:
        self.data = data
        self.name = str(json_field(data, "id"))
        self.block_size = as_length("block_size", json_field(data, "block_size"))
        scope = data.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise ValueError(f"hash_id_scope={scope!r:.40} is neither 'local' nor 'global'")
        if scope == "local":
            names.new_scope()
        self.requests: list[Request] = []
        self._names = names
        self._first_index = first_index
        self._origin_s: float | None = None

    def add_branch(self, entries: Any, place: str, parent: _Turn | None, delay_s: float) -> None:
        """Append a branch's turns and, in recorded order, its sub-agents; its first turn waits for the parent turn.

        place: where the entries stand in the line, for errors. delay_s: seconds between the parent's answer and the
        start of this branch.
        """
        if not isinstance(entries, list):
            raise ValueError(f"{place} is not a list")
        previous = None
        for i, entry in enumerate(entries):
            here = f"{place}[{i}]"
            try:
                start_s = as_seconds("t", json_field(entry, "t"))
                if self._origin_s is None:
                    self._origin_s = start_s
                if "requests" not in entry:
                    previous = self._add_turn(entry, start_s, previous, parent, delay_s)
                    continue
            except ValueError as error:
                raise ValueError(f"{here}: {error}") from error
            before = previous or parent
            delay = previous.delay_until(start_s) if previous else delay_s + start_s
            self.add_branch(entry["requests"], f"{here}.requests", before, delay)

    def _add_turn(
        self, entry: Any, start_s: float, previous: _Turn | None, parent: _Turn | None, delay_s: float
    ) -> _Turn:
        if previous and start_s < previous.start_s:
            raise ValueError(f"t steps back from {previous.start_s:g} s to {start_s:g} s")
        think = entry.get("think_time")
        if previous is None:
            think_s = delay_s + start_s
        else:
            think_s = previous.delay_until(start_s) if think is None else as_seconds("think_time", think)
        before = previous or parent
        request = Request(
            req_id=self._first_index + len(self.requests),
            arrival_s=max(0.0, think_s - (self._origin_s or 0.0)) if before is None else 0.0,
            prompt_len=as_length("in", json_field(entry, "in")),
            output_len=as_length("out", json_field(entry, "out")),
            block_hashes=self._names.names(entry.get("hash_ids", [])),
            hash_block_size=self.block_size,
            session=self.name,
            depends_on=None if before is None else before.index,
            think_time_s=0.0 if before is None else think_s,
        )
        self.requests.append(request)
        call_s = as_seconds("api_time", entry.get("api_time") or 0.0)
        return _Turn(request.req_id, start_s, call_s, request.block_hashes)


def read_session_lengths(source: TraceSource, limit: int | None) -> Read:
    """One turn a row, with the number of leading hashes that equal those of the turn before in its branch.

    Names of hashes are made up to match: the stated prefix is the turn before's, the rest is new. What branches and
    sessions share with each other is not recorded, so they share nothing, and each branch starts at 0.
    """
    names = HashNames()
    latest: dict[tuple[str, str], _Turn] = {}
    num_read = 0

    def parse(values: Sequence[str]) -> Request:
        nonlocal num_read
        session, branch, _turn, t, prompt, output, hashes, prefix, api, think = values
        previous = latest.get((session, branch))
        start_s = as_seconds("t_s", t)
        if previous and start_s < previous.start_s:
            raise ValueError(f"t_s steps back from {previous.start_s:g} s to {start_s:g} s within its branch")
        prompt_len = as_length("input_tokens", prompt)
        num_hashes = as_length("hash_blocks", hashes)
        num_shared = as_length("prefix_blocks_of_previous_turn", prefix) if prefix else 0
        if num_hashes > ceil_div(prompt_len, LENGTHS_HASH_TOKENS):
            raise ValueError(f"hash_blocks={num_hashes} of {LENGTHS_HASH_TOKENS} tokens for {prompt_len} input_tokens")
        if num_shared > min(num_hashes, len(previous.hashes) if previous else 0):
            raise ValueError(
                f"prefix_blocks_of_previous_turn={num_shared}: this turn has {num_hashes} hashes, the turn before "
                f"{len(previous.hashes) if previous else 'is missing'}"
            )
        shared = previous.hashes[:num_shared] if previous else names.fresh(0)
        wait_s = as_seconds("think_time_s", think) if think else previous.delay_until(start_s) if previous else 0.0
        request = Request(
            req_id=num_read,
            arrival_s=0.0,
            prompt_len=prompt_len,
            output_len=as_length("output_tokens", output),
            block_hashes=seal(np.concatenate([shared, names.fresh(num_hashes - num_shared)])),
            hash_block_size=LENGTHS_HASH_TOKENS,
            session=session,
            depends_on=previous.index if previous else None,
            think_time_s=wait_s if previous else 0.0,
        )
        call_s = as_seconds("api_time_s", api) if api else 0.0
        latest[session, branch] = _Turn(num_read, start_s, call_s, request.block_hashes)
        num_read += 1
        return request

    return list(islice(csv_records(source, LENGTH_COLUMNS, parse), limit)), [
        "a session's sub-agents start when it does: their own start is not recorded"
    ]
