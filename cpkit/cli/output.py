"""Writing results: to stdout, which may close early, and to files."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from cpkit.errors import InputError


def emit(text: str) -> None:
    """Print to stdout; if its reader has gone, quietly stop writing there, so that the exit code stays what it is."""
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)


def open_closed_streams() -> None:
    """Send to nothing what has nowhere to go: Python leaves None where a stream was closed at the start (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open as long as the process


def silence(stream: TextIO) -> None:
    """Point a stream whose reader has gone at nothing, so that Python's own last flush does not complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def json_text(data: Any) -> str:
    """JSON as all tools read it: NaN and infinity do not occur."""
    return json.dumps(data, indent=1, allow_nan=False)


def check_folder(path: str) -> None:
    """Refuse an output file without a name or without a folder to be in, before the work; raises InputError."""
    if not path:
        raise InputError("the name of an output file is empty")
    if Path(path).is_dir():
        raise InputError(f"{path}: a folder, where the name of a file belongs")
    if not Path(path).parent.is_dir():
        raise InputError(f"{path}: there is no folder {Path(path).parent}")


def check_writable(path: str) -> None:
    """Refuse an output file that could not be written, before the work; raises InputError, or OSError with the cause.

    What is there stays as it is, and so does what another process puts there meanwhile: a new name is asked for with a
    nameless file beside it. Pipes and devices are left alone: opening one may wait for its reader.
    """
    check_folder(path)
    file = Path(path)
    if file.is_file():
        file.open("ab").close()
    elif not file.exists():
        folder = file.resolve().parent  # of a link to nothing yet, where it will lead to
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error


def check_outputs(source: str, **paths: str | None) -> None:
    """Refuse files that could not be written, one file for two outputs, and one that is the source; by flags' names.

    None is no file, nor is - for json, which is printed. Raises InputError, or OSError with the cause.
    """
    flag_of: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None or (name, path) == ("json", "-"):
            continue
        if path == "-":
            raise InputError(f"--{name} -: only --json can be printed; name a file")
        check_writable(path)
        place = Path(path).resolve()
        if place == Path(source).resolve():
            raise InputError(f"{path}: --{name} would write over what is read")
        other = flag_of.setdefault(place, name)
        if other != name:
            raise InputError(f"{path}: --{other} and --{name} would both write it")


def write_json(path: str, data: Any) -> None:
    """Write JSON to a file, or to stdout for '-'."""
    if path == "-":
        emit(json_text(data))
    else:
        Path(path).write_text(json_text(data) + "\n", encoding="utf-8")
