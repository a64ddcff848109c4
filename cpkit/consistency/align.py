"""Lay the calls of all ranks of a group beside each other and find the first place where they part.

    call       1          2          3          4
    rank 0     gather     reduce     gather     reduce
    rank 1     gather     gather     reduce                 call 2: rank 1 skipped the reduce
    rank 2     gather     reduce     gather     reduce      ahead: ranks 0, 2 by one call that rank 1 never came to

Ranks must agree in operation, root, dtypes and number of elements, in their order. Call sites may differ, as programs
may reach one call by two ways; but once ranks part, the place where their sites parted before tells more.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cpkit.consistency.history import Entered, History, Stream

Key = Callable[[Entered], Hashable]
_MOST_TURNS = 1000


@dataclass(frozen=True, slots=True)
class Said:
    """Ranks that entered the same call at the place where ranks part; entered is None if they had not come."""

    ranks: tuple[int, ...]
    entered: Entered | None


Place = tuple[int, tuple[Said, ...]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where ranks of a stream part.

    kind: never came, missing call, extra call, order, operation, root, dtype or size; odd: the ranks in the minority.
    call: number of the call. said: what ranks entered there, most of them first. sites: the same at the first call
    that was entered from different lines, if that is earlier. ahead, behind: ranks with the most and with fewer calls,
    and how many each made.
    """

    stream: Stream
    kind: str
    odd: tuple[int, ...]
    call: int
    said: tuple[Said, ...]
    sites: tuple[int, tuple[Said, ...]] | None
    counts: dict[int, int]

    @property
    def ahead(self) -> tuple[int, ...]:
        """Ranks that made the most calls."""
        most = max(self.counts.values())
        return tuple(rank for rank, count in self.counts.items() if count == most)

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks that made fewer."""
        return tuple(rank for rank in self.counts if rank not in self.ahead)


def first_divergences(histories: Mapping[int, History]) -> tuple[list[Divergence], int]:
    """One for each stream whose ranks part, the earliest first, and the number of calls compared; by rank."""
    streams = dict.fromkeys(stream for history in histories.values() for stream in history.calls)
    found: dict[tuple[str, tuple[int, ...], str], Divergence] = {}
    compared = 0
    for stream in streams:
        lines = _lines(stream, histories)
        compared += max(map(len, lines.values()), default=0)
        divergence = compare_lines(stream, lines)
        if divergence is not None:
            found[stream.name, stream.ranks, stream.channel] = divergence
    for ranks in dict.fromkeys(stream.ranks for stream in streams if not stream.channel):
        together = [stream for stream in streams if stream.ranks == ranks and not stream.channel]
        if len(together) > 1 and any((one.name, ranks, "") in found for one in together):
            merged = _compare_together(together, histories)
            if merged is not None:
                found[merged.stream.name, ranks, ""] = merged
    return sorted(found.values(), key=_how_early), compared


def _lines(stream: Stream, histories: Mapping[int, History]) -> dict[int, list[Entered]]:
    """Each rank's calls of a stream, from where on all ranks have theirs."""
    ranks = [rank for rank in (stream.ranks or sorted(histories)) if rank in histories]
    start = max((histories[rank].whole_from(stream) for rank in ranks), default=(0, 0))
    calls = {rank: histories[rank].calls.get(stream, {}) for rank in ranks}
    return {rank: [entry for seq, entry in sorted(calls[rank].items()) if seq >= start] for rank in ranks}


def _compare_together(streams: Sequence[Stream], histories: Mapping[int, History]) -> Divergence | None:
    """A call left out or put in, told by the order in which ranks went through several groups of the same ranks.

    Such an order is no promise, as groups do not wait for each other, but where a group's ranks part anyway it shows
    what each group alone hides:     rank 0   A1 B1 A2 B2 (waits in B)       rank 1   A1 B1 A2 A3 (waits in A)
    """
    if any(history.lost for history in histories.values()):
        return None
    lines: dict[int, list[Entered]] = {}
    for stream in streams:
        for rank, line in _lines(stream, histories).items():
            lines.setdefault(rank, []).extend(line)
    merged = compare_lines(streams[0], {rank: sorted(line, key=_order) for rank, line in lines.items()})
    if merged is None or merged.kind not in ("missing call", "extra call"):
        return None
    at = merged.said[0 if merged.kind == "missing call" else 1].entered
    assert at is not None, "a call left out or put in is a call"
    stream = next(one for one in streams if one.name == at.group)
    counts = {rank: len(line) for rank, line in _lines(stream, histories).items()}
    return replace(merged, stream=stream, call=at.seq[0], counts=counts)


def compare_lines(stream: Stream, lines: Mapping[int, Sequence[Entered]]) -> Divergence | None:
    """Where the calls of a stream part, or None; lines: each rank's calls in their order."""
    parted = next(_apart(lines, _wire), None)
    if parted is None:
        return None
    at, said = parted
    turns = _turns({rank: line[: at + 1] for rank, line in lines.items()})
    for place, said_there in turns[:_MOST_TURNS]:
        kind = _shifted(lines, place, said_there)
        if kind:  # the calls behind it tell that one was left out or put in here
            at, said = place, said_there
            break
    else:
        kind = _kind(lines, at, said)
    place, said_there = turns[-1]
    return Divergence(
        stream=stream,
        kind=kind,
        odd=tuple(rank for one in said[1:] for rank in one.ranks),
        call=_number(said),
        said=said,
        sites=(_number(said_there), said_there) if place < at else None,
        counts={rank: len(line) for rank, line in lines.items()},
    )


def _wire(entry: Entered) -> Hashable:
    """What ranks must agree on."""
    return entry.group, entry.op, entry.root, entry.dtypes, entry.sizes


def _full(entry: Entered) -> Hashable:
    return _wire(entry), entry.site


def _apart(lines: Mapping[int, Sequence[Entered]], key: Key) -> Iterator[Place]:
    """Each index at which not all ranks entered the same, and who entered what there."""
    for at in range(max(map(len, lines.values()), default=0)):
        entries = {rank: line[at] if at < len(line) else None for rank, line in lines.items()}
        unsized = any(entry is not None and entry.sizes is None for entry in entries.values())
        holders: dict[Hashable, list[int]] = {}
        for rank, entry in entries.items():
            said = None if entry is None else key(_without_sizes(entry) if unsized else entry)
            holders.setdefault(said, []).append(rank)
        if len(holders) > 1:
            by_votes = sorted(holders.values(), key=lambda ranks: (-len(ranks), entries[ranks[0]] is None))
            yield at, tuple(Said(tuple(ranks), entries[ranks[0]]) for ranks in by_votes)


def _turns(lines: Mapping[int, Sequence[Entered]]) -> list[Place]:
    """Where ranks begin to come from different lines, after calls that they entered from the same."""
    turns: list[Place] = []
    before = -2
    for at, said in _apart(lines, _full):
        if at != before + 1:
            turns.append((at, said))
        before = at
    return turns


def _without_sizes(entry: Entered) -> Entered:
    return replace(entry, dtypes=entry.dtypes[:1], shapes=(), sizes=None)


def _shifted(lines: Mapping[int, Sequence[Entered]], at: int, said: tuple[Said, ...]) -> str:
    """missing call or extra call, if the odd ranks' calls go on like those of most, moved by one; else nothing."""
    if len(said) != 2:
        return ""
    before = list(map(_full, lines[said[0].ranks[0]][:at]))
    most, odd = (list(map(_full, lines[one.ranks[0]][at:])) for one in said)
    if not most or not odd:
        return ""
    if len(most) > 1 and _agree(most[1:], odd):
        return "missing call"
    if len(odd) > 1 and _agree(most, odd[1:]):
        return "extra call"
    followers = set(pairwise(before))  # the log ends here: what came after such a call in earlier rounds?
    if len(most) == 1 and (most[0], odd[0]) in followers:
        return "missing call"
    if len(odd) == 1 and (odd[0], most[0]) in followers:
        return "extra call"
    return ""


def _agree(a: Sequence[Hashable], b: Sequence[Hashable]) -> bool:
    """Two runs of calls are equal as far as both go."""
    common = min(len(a), len(b))
    return a[:common] == b[:common]


def _kind(lines: Mapping[int, Sequence[Entered]], at: int, said: tuple[Said, ...]) -> str:
    most, odd = said[0].entered, said[1].entered
    if most is None or odd is None:
        return "never came"
    rest = [list(map(_wire, lines[one.ranks[0]][at : at + 2])) for one in said[:2]]
    if len(rest[0]) == len(rest[1]) == 2 and rest[0] == rest[1][::-1]:
        return "order"
    for name, kind in (("group", "group"), ("op", "operation"), ("root", "root"), ("dtypes", "dtype")):
        if getattr(most, name) != getattr(odd, name):
            return kind
    return "size"


def _number(said: tuple[Said, ...]) -> int:
    return next(one.entered.seq[0] for one in said if one.entered is not None)


def _how_early(divergence: Divergence) -> tuple[int, bool]:
    """Ranks that wait in vain come behind what made them."""
    order = min(one.entered.order for one in divergence.said if one.entered is not None)
    return order, divergence.kind == "never came"


def _order(entry: Entered) -> int:
    return entry.order
