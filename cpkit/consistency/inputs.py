"""Find out what files hold, by their first bytes, and sort them into runs that can be compared."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cpkit.comm.call import spell_ranks
from cpkit.consistency.flight import read_dump
from cpkit.consistency.history import History
from cpkit.consistency.record_log import read_log
from cpkit.errors import InputError
from cpkit.topology import MAX_WORLD
from cpkit.views.saved_plan import SavedPlan, load_plan

_NPZ, _PICKLE, _JSON = b"PK", b"\x80", b"{"
_LOG = b'{"format": "cpkit-record'


@dataclass(slots=True)
class Inputs:
    """What was found. runs: by name, the histories of its ranks. plans: with the files they came from.

    bad: files that could not be read, each with its reason. remarks: what was left out of files that could.
    """

    runs: dict[str, dict[int, History]] = field(default_factory=dict)
    plans: list[tuple[str, SavedPlan]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def missing(self) -> list[str]:
        """Ranks of runs that no file was found of."""
        lines = []
        for run, histories in self.runs.items():
            missing = [rank for rank in range(_world(histories.values())) if rank not in histories]
            if missing:
                lines.append(f"run {run}: no file of {spell_ranks(missing)}")
        return lines


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read files, and all files of folders; raises InputError for a path that is not there or an empty folder."""
    found = Inputs()
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
        files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
        if not files:
            raise InputError(
                f"{path}: the folder holds no files; `cpkit record` leaves one for each process that calls "
                "init_process_group of torch.distributed"
            )
        for file in files:
            try:
                _read(file, found)
            except InputError as error:
                found.bad.append(str(error))
            except OSError as error:
                found.bad.append(f"{file}: {error.strerror or error}")
    return found


def _read(path: Path, found: Inputs) -> None:
    with path.open("rb") as file:
        head = file.read(len(_LOG))
    if head.startswith(_NPZ):
        found.plans.append((str(path), load_plan(path)))
    elif head == _LOG:
        _add(*read_log(path), found)
    elif head.startswith((_PICKLE, _JSON)):
        _add(*read_dump(path), found)
    else:
        raise InputError(f"{path}: neither a recorder's log, nor a flight-recorder dump, nor a saved plan")


def _add(history: History, remarks: list[str], found: Inputs) -> None:
    found.remarks += remarks
    if (world := _world([history])) > MAX_WORLD:
        raise InputError(f"{history.source}: it tells of rank {world - 1}; worlds have at most {MAX_WORLD} ranks")
    ranks = found.runs.setdefault(history.run, {})
    if history.rank in ranks:
        other = ranks[history.rank].source
        raise InputError(f"{history.source}: rank {history.rank} of run {history.run} is in {other} already; left out")
    ranks[history.rank] = history


def _world(histories: Iterable[History]) -> int:
    """Ranks that a run has, from what its files say."""
    known = [history.rank + 1 for history in histories]
    for history in histories:
        known.append(history.world or 0)
        for stream in history.calls:
            known.append(max(stream.ranks, default=-1) + 1)
    return max(known, default=0)
