"""Traces with one request a line: hash-block JSONL (Mooncake, Bailian) and CSV logs of arrivals."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple

from cpkit.arrays import Int32Array
from cpkit.workload.hash_names import HashBlockSize, HashNames
from cpkit.workload.request import Request
from cpkit.workload.trace_source import Read, TraceSource, as_length, as_seconds, csv_records, json_field, parse_json

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
PLAIN_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


class InOrder:
    """Times of one trace, which never step back.

    A step back is refused rather than sorted away: mostly it is a change of unit or two files joined, and sorting
    would quietly interleave requests that never met.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._latest = 0.0

    def check(self, seconds: float) -> float:
        """The same seconds, or ValueError if an earlier line was later."""
        if seconds < self._latest:
            raise ValueError(
                f"{self._name} steps back from {self._latest:g} s to {seconds:g} s: if all lines are one trace in one "
                "unit, sort them by time first"
            )
        self._latest = seconds
        return seconds


class _HashBlockRow(NamedTuple):
    arrival_s: float
    prompt_len: int
    output_len: int
    block_hashes: Int32Array
    chat: int | str | None
    parent: int | str | None


def read_hash_blocks(source: TraceSource, limit: int | None) -> Read:
    """`timestamp, input_length, output_length, hash_ids`, one JSON object a line.

    Mooncake: milliseconds, usually 512 tokens a hash. With chat_id (Bailian): seconds, usually 16 tokens a hash, and a
    chat waits for the answer to its parent_chat_id. Files in other block sizes are told by HashBlockSize.
    """
    names, block_size, in_order = HashNames(), HashBlockSize(), InOrder("timestamp")

    def parse(text: str) -> _HashBlockRow:
        row = parse_json(text)
        prompt_len = as_length("input_length", json_field(row, "input_length"))
        output_len = as_length("output_length", json_field(row, "output_length"))
        unit_s = 1.0 if "chat_id" in row else 1e-3
        seconds = as_seconds("timestamp", json_field(row, "timestamp"), unit_s=unit_s)
        chat, parent = (_chat_id(row, name) for name in ("chat_id", "parent_chat_id"))
        hashes = names.names(row.get("hash_ids", []))
        in_order.check(seconds)
        block_size.observe(prompt_len, len(hashes))
        return _HashBlockRow(seconds, prompt_len, output_len, hashes, chat, parent)

    rows = list(islice(source.records(parse), limit))
    size = block_size.choose(usual=512 if all(row.chat is None for row in rows) else 16)
    req_of_chat: dict[int | str, int] = {}
    requests: list[Request] = []
    for i, row in enumerate(rows):
        parent = None if row.parent is None else req_of_chat.get(row.parent)
        session = None if row.chat is None else str(row.chat) if parent is None else requests[parent].session
        if row.chat is not None:
            req_of_chat[row.chat] = i
        lens = row.prompt_len, row.output_len
        requests.append(Request(i, row.arrival_s, *lens, row.block_hashes, size, session, parent))
    return requests, [f"a hash stands for {size} tokens"]


def _chat_id(row: dict[str, Any], name: str) -> int | str | None:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | str | None):
        raise ValueError(f"{name}={value!r:.40} is neither a whole number nor a string")
    return value


def read_azure(source: TraceSource, limit: int | None) -> Read:
    """`TIMESTAMP, ContextTokens, GeneratedTokens`: the wall clock counts from the first row; no prefix hashes."""
    in_order = InOrder("TIMESTAMP")
    origin: float | None = None

    def parse(values: Sequence[str]) -> Request:
        nonlocal origin
        moment = datetime.fromisoformat(values[0])
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        lens = as_length("ContextTokens", values[1]), as_length("GeneratedTokens", values[2])
        origin = seconds if origin is None else origin
        return Request(0, in_order.check(seconds - origin), *lens)

    return numbered(islice(csv_records(source, AZURE_COLUMNS, parse), limit)), []


def read_plain(source: TraceSource, limit: int | None) -> Read:
    """`arrived_at, num_prefill_tokens, num_decode_tokens`: seconds and tokens; no prefix hashes."""
    in_order = InOrder("arrived_at")

    def parse(values: Sequence[str]) -> Request:
        seconds = as_seconds("arrived_at", values[0])
        lens = as_length("num_prefill_tokens", values[1]), as_length("num_decode_tokens", values[2])
        return Request(0, in_order.check(seconds), *lens)

    return numbered(islice(csv_records(source, PLAIN_COLUMNS, parse), limit)), []


def numbered(requests: Iterator[Request]) -> list[Request]:
    """The requests with req_id 0, 1, ..."""
    return [
        Request(i, r.arrival_s, r.prompt_len, r.output_len, r.block_hashes, r.hash_block_size)
        for i, r in enumerate(requests)
    ]
