"""The watch of a GPU's collectives, its streams played: which calls end the process, and what is said of them."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from cpkit.comm import watch
from cpkit.comm.call import Call, Group

GROUP = Group("dcp", (0, 1), 1)
LIMIT_S = 0.2


def call(number):
    return Call("all_gather", "dcp", "lse", "float32", (4, 2), "", number, "worker/heads.py:25")


@pytest.fixture
def watched(monkeypatch):
    """A watch of rank 1 that stops where it would end the process; it looks at nothing before its gate is open.

    heard: the alarm of another rank. done: whether what is on the stream has got done.
    """
    world = SimpleNamespace(heard=None, done=False, told=[], codes=[], gate=threading.Event())

    def leave(code):
        world.codes.append(code)
        world.watch.stop()

    def heard():
        world.gate.wait(5)
        return world.heard

    monkeypatch.setattr(watch, "os", SimpleNamespace(_exit=leave))
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    monkeypatch.setattr(watch, "GRACE_S", 0.05)
    monkeypatch.setattr(watch, "_event_on", lambda stream: SimpleNamespace(query=lambda: world.done))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    world.watch = watch.Watch(1, torch.device("cuda", 0), LIMIT_S, heard, world.told.append)
    yield world
    world.watch.stop()
    world.gate.set()


def codes(world, seconds=3.0):
    """Open the gate; the exit codes until there is one, or for some seconds."""
    world.gate.set()
    deadline = time.monotonic() + seconds
    while not world.codes and time.monotonic() < deadline:
        time.sleep(0.01)
    return world.codes


def test_call_that_the_host_does_not_come_back_from_is_told(watched, capfd):
    watched.watch.enter(call(1), GROUP)
    assert codes(watched) == [1]
    [text] = watched.told
    first, second = text.splitlines()
    assert first == f"rank 1 was left alone in call 1 over dcp (ranks 0, 1): {call(1)}"
    assert second.startswith("  the GPU did not get through it within 0.2 s: ")
    assert capfd.readouterr().err.startswith(f"rank 1: DesyncError: {first}")


def test_calls_that_stay_on_the_stream_are_told_with_how_many_followed(watched):
    watched.watch.enter(call(1), GROUP)
    watched.watch.leave()
    watched.watch.enter(call(2), GROUP)
    watched.watch.leave()
    assert codes(watched) == [1]
    [text] = watched.told
    assert text.splitlines()[0].endswith(f"{call(1)}, or in one of the 1 that it entered next")


def test_calls_that_get_done_and_calls_that_failed_are_not_waited_for(watched):
    watched.done = True
    for number in range(1, 4):
        watched.watch.enter(call(number), GROUP)
        watched.watch.leave()
    watched.watch.enter(call(4), GROUP)
    watched.watch.failed()
    assert codes(watched, 3 * LIMIT_S) == [] and watched.told == []


def test_alarm_of_another_rank_leaves_a_moment_to_end_by_oneself(watched):
    watched.heard = "rank 0 ran out of pages"
    assert codes(watched) == [1]
    assert watched.watch.alarm == "rank 0 ran out of pages" and watched.told == ["rank 0 ran out of pages"]


def test_watch_that_is_stopped_ends_nothing(watched):
    watched.watch.enter(call(1), GROUP)
    watched.watch.stop()
    assert codes(watched, 3 * LIMIT_S) == []
