"""A number that is shown with where it comes from.

kind         the number was
given        stated by the user
counted      counted from the model and the deployment
hardware     read from a file of hardware facts (datasheet values)
measured     measured, or interpolated in a table of measurements
calibrated   fitted to measurements
assumed      chosen here; the source says why
"""

from dataclasses import dataclass

KINDS = ("given", "counted", "hardware", "measured", "calibrated", "assumed")


@dataclass(frozen=True, slots=True)
class Figure:
    """value: in the unit that the field's name says; kind: one of KINDS; source: the file, table or reason."""

    value: float
    kind: str
    source: str

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"{self.kind!r} is none of {KINDS}"

    def __str__(self) -> str:
        return f"{self.value:,.6g} ({self.kind}: {self.source})"
