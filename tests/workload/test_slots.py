"""Slots keep each request's table in order through growth and departures."""

import numpy as np

from cpkit.workload.slots import Slots


def test_tables_grow_and_slots_are_used_again():
    slots = Slots(num_slots=3, max_blocks=4, virtual_block=8)
    a, b, c = (slots.add(req, prefill_len=10, output_left=1) for req in (70, 71, 72))
    assert not slots.has_room
    running = np.array([a, b, c])
    missing = slots.missing_blocks(running, np.array([0, 8, 9]))
    assert missing.tolist() == [0, 1, 2]
    slots.append_blocks(running, missing, np.array([4, 5, 6], np.int32))
    missing = slots.missing_blocks(running, np.array([1, 8, 25]))
    assert missing.tolist() == [1, 0, 2]
    slots.append_blocks(running, missing, np.array([1, 2, 3], np.int32))
    assert [slots.blocks_of(slot).tolist() for slot in (a, b, c)] == [[1], [4], [5, 6, 2, 3]]

    slots.remove(np.array([a, c]))
    assert slots.order.tolist() == [b]
    d = slots.add(73, prefill_len=1, output_left=1)
    assert slots.order.tolist() == [b, d]
    assert slots.req[slots.order].tolist() == [71, 73]
    assert slots.blocks_of(d).tolist() == []
    assert slots.tables.sum() == 4, "a departed request's blocks are still in a table"


def test_slots_without_requests():
    slots = Slots(2, 3, 4)
    none = np.zeros(0, np.int64)
    assert slots.missing_blocks(none, none).tolist() == []
    slots.append_blocks(none, none, np.zeros(0, np.int32))
    slots.remove(none)
    assert slots.order.size == 0
