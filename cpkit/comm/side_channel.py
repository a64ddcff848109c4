"""A few bytes between all ranks of a world, through host memory: beside the collectives, never on a GPU's stream.

rank 0    start ──── GPU work ──── finish ─► what ranks 0, 1, 2 sent
rank 1    start ── GPU work ── finish      ─► the same
rank 2    start ─────── GPU work ───────── finish ─► the same
"""

from abc import ABC, abstractmethod


class SideChannel(ABC):
    """One rank's end of the channel; exchanges are in the same order on all ranks, one begun before the next."""

    @abstractmethod
    def start(self, message: bytes) -> None:
        """Send to all ranks; does not wait for them, so that their answers travel while this rank works."""

    @abstractmethod
    def finish(self, limit_s: float, what: str) -> list[bytes]:
        """What all ranks sent in the exchange that start began, by rank.

        limit_s: how long this rank waits for others. what: of the exchange, for messages.
        Raises DesyncError, the same text on all ranks that are there: who did not come in time or is gone, or what a
        rank said before it left.
        """

    def exchange(self, message: bytes, limit_s: float, what: str) -> list[bytes]:
        """Start and finish at once."""
        self.start(message)
        return self.finish(limit_s, what)

    def alarm(self, text: str) -> None:  # noqa: B027 - simulated ranks are all released when one raises
        """Tell all other ranks why this one ends; only the first alarm of a rank counts."""

    def heard(self) -> str | None:
        """What another rank's alarm says, if there was any; does not wait."""
        return None

    def close(self) -> None:  # noqa: B027 - simulated ranks hold nothing
        """Give the channel back."""
