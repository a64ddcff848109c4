"""What a rank says when it enters a collective, and the words for ranks that say different things.

All ranks of a group must say the same; only the place in the program may differ. A ticket is a call on the wire:

    all_gather | dcp | lse | float32 | 4,2 | | 5 | worker/heads.py:25 | zeros up to TICKET_BYTES
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import FrameType

from cpkit.errors import DesyncError

TICKET_BYTES = 256
_PACKAGE = str(Path(__file__).parent)
_MOST_LINES = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that a collective spans, in group order, and where this rank stands among them."""

    name: str
    ranks: tuple[int, ...]
    place: int

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def __str__(self) -> str:
        return f"{self.name} ({spell_ranks(self.ranks)})"


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's entry into one collective.

    op, group, what: as in the plan's list; reduction: sum, min or max, else empty; dtype, shape: of the tensor put in.
    number: this rank's calls over this group so far, this one included. site: file and line outside this package.
    """

    op: str
    group: str
    what: str
    dtype: str
    shape: tuple[int, ...]
    reduction: str
    number: int
    site: str

    def __str__(self) -> str:
        op = f"{self.op} ({self.reduction})" if self.reduction else self.op
        data = f" of {self.what}, {self.dtype} {list(self.shape)}," if self.op != "barrier" else f" {self.what}"
        return f"{op}{data} at {self.site}"

    def ticket(self) -> bytes:
        """[TICKET_BYTES] the call as text between zeros; a long site loses its beginning."""
        words = (self.op, self.group, self.what, self.dtype, ",".join(map(str, self.shape)), self.reduction)
        head = "\0".join((*words, str(self.number), "")).encode()
        room = TICKET_BYTES - len(head)
        assert room > 0, self
        return (head + self.site.encode("ascii", "replace")[-room:]).ljust(TICKET_BYTES, b"\0")

    @classmethod
    def from_ticket(cls, ticket: bytes) -> "Call":
        """The call that a ticket tells; undoes ticket."""
        op, group, what, dtype, shape, reduction, number, site, *_ = f"{ticket.decode()}\0".split("\0")
        dims = tuple(int(size) for size in shape.split(",") if size)
        return cls(op, group, what, dtype, dims, reduction, int(number), site)


_AGREED = ("op", "what", "dtype", "shape", "reduction")
_SAID = attrgetter(*_AGREED)


def check_agreement(calls: Mapping[int, Call], group: Group) -> None:
    """Raise DesyncError unless all ranks (the keys) of the group said the same, their places in the program aside."""
    if len({_SAID(call) for call in calls.values()}) > 1:
        differ = [name for name in _AGREED if len({getattr(call, name) for call in calls.values()}) > 1]
        number = min(call.number for call in calls.values())
        title = f"ranks disagree about {', '.join(differ)} in call {number} over {group}"
        raise DesyncError("\n".join([title, *lines_by_rank({rank: str(call) for rank, call in calls.items()})]))


def lines_by_rank(said: Mapping[int, str]) -> list[str]:
    """One line for the ranks that say the same, lowest rank first; a long list is cut."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(said):
        ranks.setdefault(said[rank], []).append(rank)
    lines = [f"  {spell_ranks(same)}: {text}" for text, same in ranks.items()]
    left = len(lines) - _MOST_LINES
    return lines if left <= 0 else [*lines[:_MOST_LINES], f"  ... and {left} more"]


def spell_ranks(ranks: Sequence[int]) -> str:
    """0, 2, 1, 3 -> "ranks 0, 2, 1, 3";  0, 1, 2, 3, 8 -> "ranks 0..3, 8";  7 -> "rank 7"."""
    runs: list[list[int]] = []
    for before, rank in pairwise([-2, *ranks]):
        if rank == before + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [word for run in runs for word in _spell_run(run)]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}"


def _spell_run(run: Sequence[int]) -> Iterable[str]:
    return [f"{run[0]}..{run[-1]}"] if len(run) > 2 else map(str, run)


def call_site() -> str:
    """The nearest line outside this package, as folder/file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
