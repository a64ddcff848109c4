"""Read what a recorder wrote, line by line; a killed process may have left half a last line, and zeros behind it."""

import json
from pathlib import Path
from typing import Any

from cpkit.consistency.history import UNEVEN, Entered, History, Stream, numel
from cpkit.consistency.recorder import FORMAT
from cpkit.errors import InputError


def read_log(path: Path) -> tuple[History, list[str]]:
    """The history of one rank, and remarks on what of the file could not be used; raises InputError if it is no log."""
    lines = path.read_bytes().rstrip(b"\0").split(b"\n")
    cut = lines.pop()
    try:
        header = json.loads(lines[0])
        if header["format"] != FORMAT:
            raise InputError(f"{path}: format {header['format']!r}: this version reads {FORMAT!r}")
        history = History(str(path), str(header["run"]), int(header["rank"]), int(header["world"]), ended=False)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a recorder's log ({type(error).__name__}: {error})") from error
    remarks = [f"{path}: its last line is cut off and left out"] if cut else []
    reader = _Reader(history)
    for number, line in enumerate(lines[1:], 2):
        try:
            reader.read(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}:{number}: not a line of a recorder ({type(error).__name__}: {error})") from error
    if reader.unknown:
        remarks.append(f"{path}: {reader.unknown} calls over groups whose ranks torch does not know are not compared")
    if reader.any_source:
        remarks.append(f"{path}: {reader.any_source} receives from any rank are not compared")
    return history, remarks


class _Reader:
    def __init__(self, history: History) -> None:
        self.history = history
        self.groups: dict[int, tuple[str, tuple[int, ...] | None]] = {}
        self.order = 0
        self.unknown = 0
        self.any_source = 0

    def read(self, line: dict[str, Any]) -> None:
        if "end" in line:
            self.history.ended = True
        elif "name" in line:
            ranks = line["ranks"]
            self.groups[line["group"]] = line["name"], None if ranks is None else tuple(ranks)
        else:
            self.call(line)

    def call(self, line: dict[str, Any]) -> None:
        self.order += 1
        name, ranks = self.groups[line["group"]]
        if ranks is None:
            self.unknown += 1
        elif line["op"] == "recv_anysource":
            self.any_source += 1
        else:
            stream = _stream(name, ranks, self.history.rank, line)
            calls = self.history.calls.setdefault(stream, {})
            seq = (len(calls) + 1, 0)
            calls[seq] = _entered(name, line, self.order, seq)


def _stream(name: str, ranks: tuple[int, ...], rank: int, line: dict[str, Any]) -> Stream:
    """Collectives and point-to-point calls of one group do not wait for each other; each pair has its own order."""
    if line["op"] not in ("send", "recv"):
        return Stream(name, ranks)
    peer = ranks[line["peer"]]
    ends = (rank, peer) if line["op"] == "send" else (peer, rank)
    return Stream(name, ends, f"{ends[0]} -> {ends[1]}")


def _entered(name: str, line: dict[str, Any], order: int, seq: tuple[int, int]) -> Entered:
    op, shapes = line["op"], tuple(map(tuple, line["shapes"]))
    return Entered(
        group=name,
        order=order,
        seq=seq,
        op="send / recv" if op in ("send", "recv") else op,
        dtypes=tuple(line["dtypes"]),
        shapes=shapes,
        sizes=None if op in UNEVEN or "uneven" in line else tuple(numel(shapes)),
        root=line.get("root", -1),
        site=line["site"],
        step=line["step"],
    )
