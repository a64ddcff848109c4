"""Seats keep each request's table in order through growth and departures."""

import numpy as np

from cpkit.workload.running import Running


def test_tables_grow_and_seats_are_used_again():
    running = Running(num_seats=3, max_blocks=4, virtual_block=8)
    a, b, c = (running.add(req, prefill_len=10, output_left=1) for req in (70, 71, 72))
    assert not running.has_room
    seats = np.array([a, b, c])
    missing = running.missing_blocks(seats, np.array([0, 8, 9]))
    assert missing.tolist() == [0, 1, 2]
    running.append_blocks(seats, missing, np.array([4, 5, 6], np.int32))
    missing = running.missing_blocks(seats, np.array([1, 8, 25]))
    assert missing.tolist() == [1, 0, 2]
    running.append_blocks(seats, missing, np.array([1, 2, 3], np.int32))
    assert [running.blocks_of(seat).tolist() for seat in (a, b, c)] == [[1], [4], [5, 6, 2, 3]]

    running.remove(np.array([a, c]))
    assert running.order.tolist() == [b]
    d = running.add(73, prefill_len=1, output_left=1)
    assert running.order.tolist() == [b, d]
    assert running.req[running.order].tolist() == [71, 73]
    assert running.blocks_of(d).tolist() == []
    assert running.tables.sum() == 4, "a departed request's blocks are still in a table"


def test_seats_without_requests():
    running = Running(2, 3, 4)
    none = np.zeros(0, np.int64)
    assert running.missing_blocks(none, none).tolist() == []
    running.append_blocks(none, none, np.zeros(0, np.int32))
    running.remove(none)
    assert running.order.size == 0
