"""A trace file as text, JSON values or CSV cells: unpacked, line by line, with one rule for what cannot be read."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cpkit.arrays import MAX_LEN
from cpkit.errors import InputError
from cpkit.workload.request import Request

T = TypeVar("T")

Read = tuple[list[Request], list[str]]
"""What a reader gives: requests in file order, and notes on what it decided."""

GZIP_MAGIC = b"\x1f\x8b"
MAX_SECONDS = float(1 << 40)


class TraceSource:
    """Lines of a plain or gz file, told apart by content. A bad line is an InputError, or counted under skip_bad.

    A gz that ends early or is damaged counts as one bad line behind those that could still be unpacked: the line that
    it ends in may have lost its end and still look whole (`9,10,3` of `9,10,345`), so it is never read.
    """

    def __init__(self, path: Path | str, *, skip_bad: bool = False) -> None:
        self.path = Path(path)
        self.skip_bad = skip_bad
        self.num_skipped = 0
        data, self._damage = _unpack(self.path)
        # Only \n ends a line, as in JSONL: str.splitlines would also split inside strings, at U+2028.
        self._lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        if self._damage is not None:
            self._lines[-1] = b""

    def reject(self, line: int, reason: str) -> None:
        """Refuse a line: an error that names file, line and reason, or one more skipped."""
        if not self.skip_bad:
            raise InputError(f"{self.path}, line {line}: {reason}")
        self.num_skipped += 1

    def lines(self) -> Iterator[tuple[int, str]]:
        """(line number from 1, text) of every line that is not blank; undecodable lines are rejected."""
        for number, raw in enumerate(self._lines, start=1):
            if not raw.strip():
                continue
            try:
                text = raw.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                self.reject(number, f"byte {error.start} is not UTF-8 (0x{raw[error.start]:02x})")
                continue
            yield number, text
        if self._damage is not None:
            self.reject(len(self._lines), self._damage)

    def records(self, parse: Callable[[str], T], *, header_line: int = 0) -> Iterator[T]:
        """parse(text) of each line behind the header; a ValueError from parse rejects the line."""
        for number, text in self.lines():
            if number <= header_line:
                continue
            try:
                record = parse(text)
            except ValueError as error:
                self.reject(number, str(error))
                continue
            yield record

    def preview(self) -> Iterator[tuple[int, str]]:
        """(line number, text) of the lines that are not blank, undecodable bytes replaced: to recognise the format."""
        return ((i, raw.decode("utf-8", "replace").strip()) for i, raw in enumerate(self._lines, 1) if raw.strip())

    def whole_text(self) -> str:
        """All of the file as one text, for a format that is one JSON value; damage is an error under skip_bad too."""
        if self._damage is not None:
            raise InputError(f"{self.path}, line {len(self._lines)}: {self._damage}")
        data = b"\n".join(self._lines)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise InputError(f"{self.path}, line {line}: 0x{data[error.start]:02x} is not UTF-8") from error


def _unpack(path: Path) -> tuple[bytes, str | None]:
    """The file's bytes, unpacked if gz, and what is wrong with the packing (None: nothing)."""
    data = bytearray()
    try:
        with path.open("rb") as file:
            if file.read(2) != GZIP_MAGIC:
                file.seek(0)
                return file.read(), None
            file.seek(0)
            with gzip.open(file) as unpacked:
                while piece := unpacked.read1(1 << 16):
                    data += piece
    except EOFError:
        return bytes(data), "the gz file ends early: copy it again"
    except (gzip.BadGzipFile, zlib.error) as error:
        return bytes(data), f"the gz file is damaged ({error}): copy it again"
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    return bytes(data), None


def csv_records(source: TraceSource, columns: Sequence[str], parse: Callable[[list[str]], T]) -> Iterator[T]:
    """parse(values of the named columns) for each row behind the header; other columns are left alone."""
    header_line, header = next(source.preview())
    names = split_csv(header)
    places = [names.index(name) for name in columns]

    def parse_row(text: str) -> T:
        cells = split_csv(text)
        if len(cells) != len(names):
            raise ValueError(f"{len(cells)} values for {len(names)} columns")
        return parse([cells[i] for i in places])

    return source.records(parse_row, header_line=header_line)


def split_csv(text: str) -> list[str]:
    """The cells of one CSV line, without the blanks around them; raises ValueError."""
    try:
        return [cell.strip() for cell in next(csv.reader([text]), [])]
    except csv.Error as error:  # a lone carriage return, or a cell above 128 KiB
        raise ValueError(f"not CSV: {str(error).split(' - ')[0]}") from error


def parse_json(text: str) -> Any:
    """A JSON value; raises ValueError also for NaN, Infinity and nesting too deep to read."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not JSON of a trace: nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a trace can hold")


def json_field(record: Any, name: str) -> Any:
    """record[name] of a JSON object; raises ValueError that names the field."""
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} where an object with {name!r} belongs")
    if name not in record:
        raise ValueError(f"no field {name!r}")
    return record[name]


def as_length(name: str, value: Any) -> int:
    """A token count from JSON or CSV text: whole and within [0, 2^40], or ValueError."""
    if isinstance(value, str):
        try:
            value = int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
        except ValueError:
            raise ValueError(f"{name}={value[:40]!r} is not a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r:.40} is not a number")
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{name}={value} is not a whole number of tokens")
    length = int(value)
    if not 0 <= length <= MAX_LEN:
        raise ValueError(f"{name}={length if abs(length) < 1 << 64 else 'more than 64 bits'}: it is from 0 to 2^40")
    return length


def as_seconds(name: str, value: Any, *, unit_s: float = 1.0) -> float:
    """A time from JSON or CSV text in seconds: finite and within [0, 2^40], or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name}={value!r:.40} is not a number")
    try:
        seconds = float(value) * unit_s
    except (ValueError, OverflowError):
        raise ValueError(f"{name}={value!r:.40} is not a number that fits") from None
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise ValueError(f"{name}={value!r:.40}: a time is finite, not negative and at most 2^40 s")
    return seconds
