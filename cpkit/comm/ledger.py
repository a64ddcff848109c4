"""What a rank really sent, counted as it goes, and the first place where that differs from the plan's list."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from cpkit.errors import DesyncError
from cpkit.planner.collectives import Collective


@dataclass(frozen=True, slots=True)
class Issued:
    """One collective that moved data. elements, bytes: what this rank put in; site: where in the program."""

    op: str
    group: str
    what: str
    dtype: str
    elements: int
    bytes: int
    site: str


@dataclass(frozen=True, slots=True)
class Total:
    """Collectives of one kind over some steps, and the bytes that this rank put in."""

    calls: int
    bytes: int


class Ledger:
    """Collectives of one rank in the order issued, taken once a step or layer.

    A call counts if it can move data: a group of one rank, an empty tensor and a barrier do not.
    """

    def __init__(self) -> None:
        self._issued: list[Issued] = []
        self._expected: list[Collective] | None = None
        self._next = 0
        self._whose = ""

    def expect(self, planned: Iterable[Collective] | None, whose: str = "") -> None:
        """From here on refuse a collective that is not the next of a plan's list; None: count whatever comes.

        whose: rank and step, for the message.
        """
        self._expected = None if planned is None else [one for one in planned for _ in range(one.times)]
        self._next, self._whose = 0, whose

    def add(self, entry: Issued) -> None:
        """Count one collective, before it is entered. Raises DesyncError where another one was expected."""
        if self._expected is not None:
            self._hold(entry)
        self._issued.append(entry)

    def check_done(self) -> None:
        """Raise DesyncError if collectives that were expected have not been issued."""
        if self._expected is not None and self._next < len(self._expected):
            self._hold(None)

    def _hold(self, entry: Issued | None) -> None:
        assert self._expected is not None, "called while something is expected"
        planned = self._expected[self._next] if self._next < len(self._expected) else None
        if planned is None or entry is None or _key(planned) != _key(entry):
            raise DesyncError(f"{self._whose}: {Difference(self._next, planned, entry)}")
        self._next += 1

    def take(self) -> tuple[Issued, ...]:
        """What was issued since the last take."""
        issued, self._issued = tuple(self._issued), []
        return issued


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where what was issued leaves the plan; None where one of the two has ended."""

    index: int
    planned: Collective | None
    issued: Issued | None

    def __str__(self) -> str:
        planned = f"the plan has {_spell(self.planned)}" if self.planned else "the plan has ended"
        issued = f"issued was {_spell(self.issued)} at {self.issued.site}" if self.issued else "nothing more was issued"
        return f"collective {self.index}: {planned}, {issued}"


def compare(issued: Iterable[Issued], planned: Iterable[Collective]) -> Difference | None:
    """First difference in op, group, data, dtype, elements or order, or None. `times` of the plan count one by one."""
    wanted = (collective for collective in planned for _ in range(collective.times))
    for index, (plan, entry) in enumerate(zip_longest(wanted, issued)):
        if plan is None or entry is None or _key(plan) != _key(entry):
            return Difference(index, plan, entry)
    return None


def _key(one: Collective | Issued) -> tuple[str, str, str, str, int]:
    return one.op, one.group, one.what, one.dtype, one.elements


def _spell(one: Collective | Issued) -> str:
    return f"{one.op} of {one.what} over {one.group}, {one.elements} {one.dtype}"
