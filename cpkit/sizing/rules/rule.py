"""A support rule: what an engine refuses, in a sentence with the values, with its source and the way out."""

from collections.abc import Callable
from dataclasses import dataclass

from cpkit.sizing.deployment import ENGINES, Deployment


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that an engine does not support.

    id: begins with the engine's name. sentence, change: what is refused and what would satisfy the rule; {d.dcp} and
    the like stand for a deployment's values. where: file of the engine. breaks: this deployment is refused.
    knobs: the settings whose change can satisfy it. derived: concluded from the engine's code, not seen refused.
    """

    id: str
    sentence: str
    where: str
    breaks: Callable[[Deployment], bool]
    change: str
    knobs: tuple[str, ...]
    derived: bool = False

    @property
    def engine(self) -> str:
        """The engine that refuses."""
        return self.id.partition("-")[0]

    @property
    def source(self) -> str:
        """Engine, version and file."""
        return f"{ENGINES[self.engine]}, {self.where}" + ("; derived, not run" if self.derived else "")


@dataclass(frozen=True, slots=True)
class Note:
    """What holds for a deployment without refusing it; fields as of Rule."""

    id: str
    sentence: str
    where: str
    holds: Callable[[Deployment], bool]

    @property
    def engine(self) -> str:
        """The engine that it is about."""
        return self.id.partition("-")[0]

    @property
    def source(self) -> str:
        """Engine, version and file."""
        return f"{ENGINES[self.engine]}, {self.where}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rule with a deployment's values in it."""

    rule: Rule
    sentence: str
    change: str


def fill(text: str, deployment: Deployment) -> str:
    """The text with a deployment's values.  "dcp={d.dcp}" -> "dcp=8" """
    return text.format(d=deployment)
