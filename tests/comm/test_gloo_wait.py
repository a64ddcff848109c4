"""How a rank waits for gloo: in short turns, whose end is no failure, whenever the work gets done."""

import pytest

from cpkit.comm.torch_dist import GlooComm
from cpkit.errors import DesyncError


class Work:
    """A collective that is done at its n-th look or wait, counted together, and then raises `error`, if any.

    A wait that begins before that ends with its time up, as gloo's does, even if the work is done by then.
    """

    def __init__(self, done_at, error=""):
        self.done_at, self.error, self.time = done_at, error, 0

    def is_completed(self):
        self.time += 1
        return self.time > self.done_at

    def wait(self, _):
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


class Channel:
    """Says that another rank has ended, from its n-th question on."""

    def __init__(self, says_at):
        self.left = says_at

    def heard(self):
        self.left -= 1
        return "rank 1 raised ValueError: planted" if self.left < 0 else None


@pytest.fixture
def waiting():
    """What waits, without a job."""
    comm = GlooComm.__new__(GlooComm)
    comm._channel = None
    return comm._wait


@pytest.mark.parametrize("done_at", range(6))
def test_work_that_gets_done_between_two_looks_is_done(waiting, done_at):
    waiting(Work(done_at))


@pytest.mark.parametrize("done_at", range(6))
def test_what_work_raises_is_raised(waiting, done_at):
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        waiting(Work(done_at, "Connection closed by peer"))


def test_another_ranks_end_is_heard_meanwhile():
    comm = GlooComm.__new__(GlooComm)
    comm._channel = Channel(says_at=2)
    with pytest.raises(DesyncError, match="rank 1 raised ValueError: planted"):
        comm._wait(Work(done_at=1000))
