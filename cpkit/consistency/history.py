"""What one rank did, whoever wrote it down: its calls, group by group, in the order they were made."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cpkit.comm.call import spell_ranks

UNEVEN = frozenset({"all_to_all", "all_to_all_v_single", "alltoall", "alltoall_base"})
"""Operations into which ranks may put different sizes."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Calls that meet each other: the collectives of a group, or what one rank sends another.

    ranks: in the world, all that take part. name: the group's in torch; channel: "" or "0 -> 1".
    """

    name: str
    ranks: tuple[int, ...]
    channel: str = ""

    def __str__(self) -> str:
        what = f"sends {self.channel} in group" if self.channel else "group"
        return f"{what} {self.name!r} ({spell_ranks(self.ranks)})"


@dataclass(frozen=True, slots=True)
class Entered:
    """One rank's entry into one call.

    group: the stream's name. order: among all calls of the rank. seq: its number in the stream, from (1, 0); calls
    that torch coalesced share the first half. root: -1 for none. sizes: the elements of each tensor that must be as
    large on all ranks, None where ranks may differ. state: how far it came, where that is known.
    """

    group: str
    order: int
    seq: tuple[int, int]
    op: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...] | None
    root: int
    site: str
    step: int = 0
    state: str = ""

    def __str__(self) -> str:
        root = f" root {self.root}" if self.root >= 0 else ""
        tensors = list(zip(self.dtypes, self.shapes, strict=True))
        shown = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in tensors[:2])
        more = f", ... ({len(tensors)} tensors)" if len(tensors) > 2 else ""
        return f"{self.op}{root}{' ' if shown else ''}{shown}{more}"


@dataclass(slots=True)
class History:
    """All that is known of one rank of one run.

    source: the file. world: number of ranks, None if unknown. ended: the process came to its end; None if unknown.
    calls: of each stream, by seq. lost: old calls are gone; first: the seq from which on a stream is whole, if so.
    """

    source: str
    run: str
    rank: int
    world: int | None
    ended: bool | None = None
    lost: bool = False
    calls: dict[Stream, dict[tuple[int, int], Entered]] = field(default_factory=dict)
    first: dict[Stream, tuple[int, int]] = field(default_factory=dict)

    def whole_from(self, stream: Stream) -> tuple[int, int]:
        """The seq from which on no call of a stream is gone; beyond all where that cannot be told."""
        return self.first.get(stream, (sys.maxsize, 0)) if self.lost else (0, 0)

    def last(self) -> Entered | None:
        """The call that the rank entered last, in whatever group."""
        return max((entry for calls in self.calls.values() for entry in calls.values()), key=_order, default=None)


def numel(shapes: Sequence[Sequence[int]]) -> Iterator[int]:
    """Elements of each shape.  [2, 3], [] -> 6, 1"""
    for shape in shapes:
        elements = 1
        for extent in shape:
            elements *= extent
        yield elements


def _order(entry: Entered) -> int:
    return entry.order
