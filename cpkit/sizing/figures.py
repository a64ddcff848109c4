"""A number that is shown with where it comes from.

kind         the number was
given        stated by the user
counted      counted from the model and the deployment
hardware     read from a file of hardware facts (datasheet values)
measured     measured, or interpolated in a table of measurements
calibrated   fitted to measurements
assumed      chosen here; the source says why
"""

from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("given", "counted", "hardware", "measured", "calibrated", "assumed")


@dataclass(frozen=True, slots=True)
class Figure:
    """value: in the unit that the field's name says; kind: one of KINDS; source: the file, table or reason.

    parts: of a sum whose summands are of several kinds, one Figure a kind, largest first; the sum's kind is the
    first's, its source names all of theirs. Empty: all of it is of one kind.
    """

    value: float
    kind: str
    source: str
    parts: tuple["Figure", ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"{self.kind!r} is none of {KINDS}"

    @property
    def by_kind(self) -> tuple["Figure", ...]:
        """One Figure for each kind that is in it, largest first."""
        return self.parts or (self,)

    @property
    def words(self) -> str:
        """The kind, and of a mixed sum the share of each.  measured; measured 62%, hardware 38%"""
        if not self.parts:
            return self.kind
        shares = [(part.kind, part.value / self.value) for part in self.parts]
        return ", ".join(f"{kind} {share:.0%}" if share >= 0.01 else f"{kind} under 1%" for kind, share in shares)

    def __str__(self) -> str:
        return f"{self.value:,.6g} ({self.kind}: {self.source})"


def add_up(figures: Iterable[Figure]) -> Figure:
    """The sum, which tells how much of it is of which kind; the source of a kind is that of its largest summand."""
    totals: dict[str, float] = {}
    largest: dict[str, Figure] = {}
    for figure in figures:
        for part in figure.parts or (figure,):
            kind = part.kind
            if not part.value:
                continue
            if kind not in totals:
                totals[kind], largest[kind] = part.value, part
                continue
            totals[kind] += part.value
            if part.value > largest[kind].value:
                largest[kind] = part
    if not totals:
        return Figure(0.0, "counted", "nothing is added up")
    parts = [Figure(total, kind, largest[kind].source) for kind, total in totals.items()]
    if len(parts) == 1:
        return parts[0]
    parts.sort(key=lambda part: -part.value)
    return Figure(sum(totals.values()), parts[0].kind, "; ".join(part.source for part in parts), tuple(parts))
