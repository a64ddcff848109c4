"""Read the dumps of PyTorch's flight recorder, pickled or JSON (TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE).

    {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "entries": [
        {"record_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0, "is_p2p": false,
         "profiling_name": "nccl:all_reduce", "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
         "output_dtypes": ["Float"], "state": "completed", "frames": [{"name", "filename", "line"}, ...]}, ...]}

A dump does not tell its rank: that is the number its file name ends in, as torch writes it. The buffer is a ring, so
old entries may be gone; then comparison starts where all ranks still have theirs. Sizes are compared on the side that
is as large on all ranks: what a scatter or an all-gather gives, what any other operation takes.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from cpkit.consistency.call_site import DEPTH, GLUE, short_path
from cpkit.consistency.history import UNEVEN, Entered, History, Stream, numel
from cpkit.consistency.safe_pickle import load_plain
from cpkit.errors import InputError

OUTPUT_SIDE = ("all_gather", "_all_gather", "ALLGATHER", "scatter")
_INSIDE = ("-packages/torch/", "/torch/distributed/", "/cpkit/consistency/")
_PEERS = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")


def rank_of_name(path: Path) -> int:
    """nccl_trace_rank_7, comm_lib_trace_rank_7, 7.json, 7.pkl -> 7; raises InputError for a name without a number."""
    number = re.search(r"(\d+)(\.(json|pkl|pickle))?$", path.name)
    if number is None:
        raise InputError(f"{path}: the name of a flight-recorder dump ends in its rank, as in nccl_trace_rank_7")
    return int(number[1])


def read_dump(path: Path) -> tuple[History, list[str]]:
    """The history of one rank, and remarks on what could not be used; raises InputError if it is no such dump."""
    data = path.read_bytes()
    try:
        dump = json.loads(data) if data[:1] == b"{" else load_plain(data)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(dump, dict) or not {"version", "pg_config", "entries"} <= dump.keys():
        raise InputError(f"{path}: not a flight-recorder dump, which has version, pg_config and entries")
    history = History(str(path), "flight recorder", rank_of_name(path), None)
    try:
        return history, [f"{path}: {remark}" for remark in _Dump(dump, history).read()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{path}: entries of another form ({type(error).__name__}: {error})") from error


class _Dump:
    def __init__(self, dump: dict[str, Any], history: History) -> None:
        self.history = history
        self.entries = sorted(dump["entries"], key=lambda entry: int(entry["record_id"]))
        self.wrapped = history.lost = bool(self.entries) and int(self.entries[0]["record_id"]) > 0
        self.ranks = {name: _ranks(config["ranks"]) for name, config in dump["pg_config"].items()}
        self.skipped: Counter[str] = Counter()

    def read(self) -> list[str]:
        """Fill the history; returns remarks."""
        if self.wrapped:
            self.skipped[f"{self.entries[0]['record_id']} entries were overwritten in the ring before the dump"] = 0
        for entry in self.entries:
            self.entry(entry)
        return [f"{reason}: {count} left out" if count else reason for reason, count in self.skipped.items()]

    def entry(self, entry: dict[str, Any]) -> None:
        name, description = entry["process_group"]
        op = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        if op == "coalesced" and entry.get("is_p2p"):
            return  # the envelope of sends and receives that have entries of their own
        ranks = self.ranks.get(name, ())
        peers = _PEERS.fullmatch(op)
        if peers:
            self.point_to_point(entry, name, ranks, peers)
            return
        stream = Stream(name if description in ("", "undefined") else f"{name} {description}", ranks)
        calls = self.history.calls.setdefault(stream, {})
        number = int(entry["collective_seq_id"])
        place = 0
        while (number, place) in calls:  # the calls of a coalesced group have one number
            place += 1
        calls[number, place] = _entered(stream.name, entry, op, (number, place))
        if self.wrapped:
            self.history.first.setdefault(stream, (number + 1, 0))  # part of the first number may be gone

    def point_to_point(self, entry: dict[str, Any], name: str, ranks: tuple[int, ...], peers: "re.Match[str]") -> None:
        if self.wrapped:
            self.skipped["sends and receives cannot be counted in a ring that wrapped"] += 1
            return
        ends = (int(peers[2]), int(peers[4])) if peers[1] == "send" else (int(peers[4]), int(peers[2]))
        source, target = (ranks[end] if ranks else end for end in ends)
        calls = self.history.calls.setdefault(Stream(name, (source, target), f"{source} -> {target}"), {})
        seq = (len(calls) + 1, 0)
        calls[seq] = _entered(name, entry, "send / recv", seq)


def _ranks(text: Any) -> tuple[int, ...]:
    """ "[0, 1]" -> (0, 1)"""
    return tuple(int(rank) for rank in (json.loads(text) if isinstance(text, str) else text))


def _entered(name: str, entry: dict[str, Any], op: str, seq: tuple[int, int]) -> Entered:
    side = "output" if op.startswith(OUTPUT_SIDE) or (op == "send / recv" and not entry["input_sizes"]) else "input"
    shapes = tuple(tuple(int(extent) for extent in shape) for shape in entry[f"{side}_sizes"])
    dtypes = tuple(map(str, entry[f"{side}_dtypes"]))
    return Entered(
        group=name,
        order=int(entry["record_id"]),
        seq=seq,
        op=op,
        dtypes=(dtypes * len(shapes))[: len(shapes)],  # some versions name the dtype of a list once
        shapes=shapes,
        sizes=None if op in UNEVEN else tuple(numel(shapes)),
        root=-1,
        site=_site(entry.get("frames") or []),
        state=str(entry["state"]),
    )


def _site(frames: list[dict[str, Any]]) -> str:
    """The nearest Python lines outside torch."""
    outside = [frame for frame in frames if not _is_inside(frame["filename"])]
    return " < ".join(f"{short_path(frame['filename'])}:{frame['line']}" for frame in outside[:DEPTH]) or "unknown"


def _is_inside(filename: str) -> bool:
    """In torch or the recorder, or no Python at all."""
    if not filename.endswith(".py") and not filename.startswith("<"):
        return True
    return filename.endswith(GLUE) or any(folder in filename for folder in _INSIDE)
