"""The file that keeps a sweep's outcomes as they come: what the sweep is of, then one line a candidate, in JSON.

Started again with the same file a sweep goes on where it was. A file of another sweep is refused, and so is one that
another process writes now: both would replay the same.
"""

import fcntl
import json
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import cpkit
from cpkit.digest import digest
from cpkit.errors import InputError
from cpkit.sizing.sweep.candidate import Candidate
from cpkit.sizing.sweep.replay import Outcome, SweepSetting
from cpkit.workload.request import Trace

FORMAT = "cpkit-sweep-1"


class Results:
    """The outcomes that a file holds, and where others are added; none are kept where path is None.

    Use it in a `with`, which keeps other processes from the file. Raises InputError for a file of something else, and
    OSError for one that cannot be written.
    """

    def __init__(self, path: Path | None, trace: Trace, setting: SweepSetting) -> None:
        self._path, self._header = path, sweep_header(trace, setting)
        self._file: TextIO | None = None
        self.outcomes: dict[Candidate, Outcome] = {}

    def __enter__(self) -> "Results":
        if self._path is None:
            return self
        if self._path.exists() and not self._path.is_file():
            raise InputError(f"{self._path}: results are kept in a plain file, which can be read again")
        self._file = self._path.open("a+", encoding="utf-8")
        try:
            _lock(self._path, self._file)
            self._read(self._path, self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, outcome: Outcome) -> None:
        """Keep one more."""
        self.outcomes[outcome.candidate] = outcome
        self._write(outcome.to_json())

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def _read(self, path: Path, file: TextIO) -> None:
        """Outcomes of earlier runs; a last line that an interrupt cut short is dropped. An empty file gets a header."""
        file.seek(0)
        try:
            whole, _, cut = file.read().rpartition("\n")
            lines = whole.splitlines()
            if not lines and not cut:
                self._write(self._header)
                return
            header = json.loads(lines[0]) if lines else None
            found = [Outcome.from_json(json.loads(line)) for line in lines[1:]]
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise ValueError("its first line says nothing of a sweep")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path}: not the results of a sweep ({error}); name another file") from error
        if header != self._header:
            raise InputError(
                f"{path}: results of another sweep ({_differences(header, self._header)}); name another file"
            )
        if cut:
            file.truncate(len(f"{whole}\n".encode()))
        self.outcomes = {outcome.candidate: outcome for outcome in found}


def _lock(path: Path, file: TextIO) -> None:
    """Keep other sweeps from the file until it is closed; raises InputError where one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{path}: another sweep writes it now; wait for its end, or name another file") from error
    except OSError:
        return  # a file system without locks: whole lines are appended, and two sweeps only replay the same


def sweep_header(trace: Trace, setting: SweepSetting) -> dict[str, Any]:
    """What a sweep is of, for people, and a digest of everything that outcomes depend on but the candidate."""
    return {
        "format": FORMAT,
        "cpkit": cpkit.__version__,
        "trace": trace.name,
        "requests": len(trace.requests),
        "model": setting.model.name,
        "chip": setting.chip,
        "engine": setting.engine,
        "drafts": setting.budget.num_speculative_tokens,
        "sweep": sweep_digest(trace, setting),
    }


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What differs, in words.  model glm-5.2, here deepseek-v3.2"""
    told = [f"{name} {found.get(name)}, here {value}" for name, value in wanted.items() if found.get(name) != value]
    if len(told) > 1:
        told.pop()  # the digest, which always differs
    else:
        told = ["the requests themselves, --load, --seed, or a limit or assumption differs"]
    return "; ".join(told)


def sweep_digest(trace: Trace, setting: SweepSetting) -> str:
    """A fingerprint of everything that outcomes depend on but the candidate."""
    requests = [
        (
            [request.prompt_len, request.output_len, -1 if request.depends_on is None else request.depends_on],
            repr((request.arrival_s, request.think_time_s, request.hash_block_size, request.session)),
            request.block_hashes,
        )
        for request in trace.requests
    ]
    return digest((requests, repr(setting)))
