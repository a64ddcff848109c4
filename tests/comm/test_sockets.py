"""The side channel over sockets, its ranks played by threads: what arrives, who is missing, and who says so."""

import socket
import threading
import time

import pytest

from cpkit.comm.sockets import ADDRESS_BYTES, Listener
from cpkit.errors import DesyncError


def play(size, program, limit_s=5):
    """Run program(rank, channel) on connected ranks; what each returned or raised as DesyncError, by rank."""
    doors = [Listener(size) for _ in range(size)]
    assert all(len(door.address) == ADDRESS_BYTES for door in doors)
    told = {}

    def run(rank):
        channel = doors[rank].connect(rank, [door.address for door in doors], limit_s)
        try:
            told[rank] = program(rank, channel)
        except DesyncError as error:
            channel.alarm(str(error))
            told[rank] = str(error)
        finally:
            done.wait(10)  # a rank that has failed keeps its connections, as a process does that still ends
            channel.close()

    done = threading.Barrier(size)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [told.get(rank) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_exchange_gives_every_rank_all_messages_in_rank_order(size):
    def program(rank, channel):
        return [channel.exchange(b"%d-%d" % (rank, i), 5, "x") for i in range(20)]

    expected = [[b"%d-%d" % (rank, i) for rank in range(size)] for i in range(20)]
    assert play(size, program) == [expected] * size


def test_messages_may_be_empty_of_any_size_and_larger_than_a_socket_buffer():
    sizes = [0, 1, 8 << 20]

    def program(rank, channel):
        return [len(message) for message in channel.exchange(b"x" * sizes[rank], 10, "x")]

    assert play(3, program) == [sizes] * 3


def test_what_was_started_early_is_finished_late():
    def program(rank, channel):
        channel.start(bytes([rank]))
        if rank == 1:
            time.sleep(0.3)
        return channel.finish(5, "x")

    assert play(3, program) == [[b"\0", b"\1", b"\2"]] * 3


def test_missing_rank_is_named_by_all_within_the_limit():
    start = time.monotonic()

    def program(rank, channel):
        if rank == 2:
            time.sleep(1)
        channel.exchange(b"", 0.3, "step 7")

    assert play(4, program) == ["step 7: rank 2 did not come within 0.3 s"] * 4
    assert time.monotonic() - start < 4


def test_rank_that_is_gone_is_named_at_once():
    def program(rank, channel):
        if rank == 1:
            channel.close()
            return None
        channel.exchange(b"", 30, "step 7")

    start = time.monotonic()
    text = "step 7: rank 1 is gone: died, or ended before"
    assert play(3, program) == [text, None, text]
    assert time.monotonic() - start < 5


def test_alarm_is_raised_by_all_others_and_only_the_first_counts():
    def program(rank, channel):
        if rank == 0:
            channel.alarm("rank 0 ran out of pages")
            channel.alarm("and more")
            return "told"
        while rank == 1 and channel.heard() is None:
            time.sleep(0.01)
        if rank == 1:
            return channel.heard()
        channel.exchange(b"", 30, "step 7")

    assert play(3, program) == ["told", "rank 0 ran out of pages", "rank 0 ran out of pages"]


def test_stranger_at_the_door_is_sent_away():
    doors = [Listener(2), Listener(2)]
    port = int(doors[0].address.split()[1])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n    ")
        addresses = [door.address for door in doors]
        other = threading.Thread(target=lambda: doors[1].connect(1, addresses, 5).exchange(b"1", 5, "x"))
        other.start()
        channel = doors[0].connect(0, addresses, 5)
        assert channel.exchange(b"0", 5, "x") == [b"0", b"1"]
        other.join()


def test_rank_that_never_connects_is_named():
    doors = [Listener(2), Listener(2)]
    with pytest.raises(DesyncError, match=r"rank 0 has no side channel to rank 1 .*--guard off does without"):
        doors[0].connect(0, [door.address for door in doors], 0.2)
