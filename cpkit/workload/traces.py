"""Read a request trace of any known format, told by what the file holds and not by its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpkit.errors import InputError
from cpkit.workload.client_formats import read_clients
from cpkit.workload.request import Trace
from cpkit.workload.request_formats import AZURE_COLUMNS, PLAIN_COLUMNS, read_azure, read_hash_blocks, read_plain
from cpkit.workload.session_formats import LENGTH_COLUMNS, read_session_lengths, read_sessions
from cpkit.workload.trace_source import Read, TraceSource, parse_json, split_csv

HASH_BLOCK_FIELDS = ("timestamp", "input_length", "output_length")
SESSION_FIELDS = ("id", "block_size", "requests")

Reader = Callable[[TraceSource, int | None], Read]

JSONL_READERS: dict[tuple[str, ...], tuple[str, Reader]] = {
    HASH_BLOCK_FIELDS: ("hash-blocks", read_hash_blocks),
    SESSION_FIELDS: ("agentic-sessions", read_sessions),
}
CSV_READERS: dict[tuple[str, ...], tuple[str, Reader]] = {
    AZURE_COLUMNS: ("azure", read_azure),
    LENGTH_COLUMNS: ("agentic-lengths", read_session_lengths),
    PLAIN_COLUMNS: ("plain", read_plain),
}


def read_trace(path: Path | str, *, seed: int = 0, skip_bad: bool = False, limit: int | None = None) -> Trace:
    """The requests of a trace file, plain or gz.

    | format             | file                                                      | told by             |
    | ------------------ | --------------------------------------------------------- | ------------------- |
    | `hash-blocks`      | JSONL of requests with prefix hashes (Mooncake, Bailian)  | `HASH_BLOCK_FIELDS` |
    | `agentic-sessions` | JSONL of whole sessions, sub-agents nested                | `SESSION_FIELDS`    |
    | `agentic-lengths`  | CSV of session turns, with shared-prefix counts           | `LENGTH_COLUMNS`    |
    | `azure`            | CSV log with wall-clock times                             | `AZURE_COLUMNS`     |
    | `plain`            | CSV of arrival seconds and lengths                        | `PLAIN_COLUMNS`     |
    | `clients`          | JSON array of clients (ServeGen), drawn with seed         | a leading `[`       |

    limit: read no more than this many requests. A line that cannot be read raises InputError with file, line number
    and reason; skip_bad counts such lines in Trace.num_skipped instead. A trace without a request is an InputError.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit}: a trace has at least one request")
    source = TraceSource(path, skip_bad=skip_bad)
    format_name, reader = recognise(source, seed)
    requests, notes = reader(source, limit)
    if not requests:
        skipped = f"; {source.num_skipped} lines could not be read" if source.num_skipped else ""
        raise InputError(f"{source.path}: an empty trace: it holds no request{skipped}")
    return Trace(source.path.name, format_name, tuple(requests), source.num_skipped, tuple(notes))


def recognise(source: TraceSource, seed: int) -> tuple[str, Reader]:
    """The format's name and its reader, from the header or the first JSON object; raises InputError."""
    line, first = next(source.preview(), (0, ""))
    if not first:
        # Says so if the gz ended before its first line did.
        list(source.lines())
        raise InputError(f"{source.path}: an empty trace: it holds no line that can be read")
    if first.startswith("["):
        return "clients", lambda src, limit: read_clients(src, limit, seed)
    if first.startswith("{"):
        return _recognise_jsonl(source)
    try:
        columns = set(split_csv(first))
    except ValueError as error:
        raise InputError(f"{source.path}, line {line}: {error}") from error
    for needed, found in CSV_READERS.items():
        if columns >= set(needed):
            return found
    raise InputError(
        f"{source.path}, line {line}: {first[:60]!r} starts no known trace. Known are JSONL with "
        f"{_one_of(JSONL_READERS)}, CSV with the columns {_one_of(CSV_READERS)}, and a JSON array of clients"
    )


def _recognise_jsonl(source: TraceSource) -> tuple[str, Reader]:
    """By the first object that has all of a format's fields: a bad first line must not hide the format."""
    seen: tuple[int, Any] | None = None
    for line, text in source.preview():
        try:
            record = parse_json(text)
        except ValueError as error:
            seen = seen or (line, error)
            continue
        for needed, found in JSONL_READERS.items():
            if isinstance(record, dict) and record.keys() >= set(needed):
                return found
        seen = seen or (line, f"no record of a known trace: JSONL records have {_one_of(JSONL_READERS)}")
    assert seen is not None
    raise InputError(f"{source.path}, line {seen[0]}: {seen[1]}")


def _one_of(readers: dict[tuple[str, ...], tuple[str, Reader]]) -> str:
    return " or ".join(",".join(needed) for needed in readers)
