"""What ranks say of a collective: on the wire, in words, and where they differ."""

import pytest

from cpkit.comm.call import TICKET_BYTES, Call, Group, call_site, check_agreement, lines_by_rank, spell_ranks
from cpkit.errors import DesyncError

CALL = Call("all_gather", "dcp", "lse", "float32", (4, 2), "", 5, "cpkit/worker.py:88")
GROUP = Group("dcp", (0, 2, 1, 3), 0)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(CALL, id="plain"),
        pytest.param(Call("barrier", "world", "barrier", "", (), "", 1, "a.py:1"), id="no-tensor"),
        pytest.param(Call("all_reduce", "pcp", "count", "int64", (), "max", 2**40, "a.py:1"), id="scalar"),
        pytest.param(Call("all_to_all", "tp", "x" * 64, "uint8", (0, 2**40), "", 1, ""), id="empty-tensor-no-site"),
    ],
)
def test_a_ticket_tells_the_call(call):
    assert len(call.ticket()) == TICKET_BYTES
    assert Call.from_ticket(call.ticket()) == call


def test_a_long_site_keeps_its_end():
    told = Call.from_ticket(Call("barrier", "world", "barrier", "", (), "", 1, "é" * 300 + "/worker.py:88").ticket())
    assert told.site.endswith("?/worker.py:88") and len(told.site) > 200


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([7], "rank 7"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0..2"),
        ([0, 2, 1, 3], "ranks 0, 2, 1, 3"),
        ([*range(128), 200, 254, 255], "ranks 0..127, 200, 254, 255"),
    ],
)
def test_spell_ranks(ranks, words):
    assert spell_ranks(ranks) == words


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("op", "all_to_all"),
        ("what", "outputs"),
        ("dtype", "int32"),
        ("shape", (2, 4)),
        ("reduction", "sum"),
    ],
)
def test_ranks_that_differ_are_named_with_the_field(field, value):
    words = {name: getattr(CALL, name) for name in Call.__slots__}
    other = Call(**(words | {field: value}))
    with pytest.raises(DesyncError) as told:
        check_agreement({0: CALL, 1: CALL, 2: other, 3: CALL}, GROUP)
    title, *lines = str(told.value).splitlines()
    assert title == f"ranks disagree about {field} in call 5 over dcp (ranks 0, 2, 1, 3)"
    assert lines == [f"  ranks 0, 1, 3: {CALL}", f"  rank 2: {other}"]


def test_the_same_call_from_another_line_agrees():
    words = {name: getattr(CALL, name) for name in Call.__slots__}
    check_agreement({0: CALL, 1: Call(**(words | {"site": "elsewhere.py:1"}))}, GROUP)


def test_a_long_list_of_ranks_is_cut():
    lines = lines_by_rank({rank: f"state {rank}" for rank in range(256)})
    assert lines[:2] == ["  rank 0: state 0", "  rank 1: state 1"]
    assert len(lines) == 17 and lines[-1] == "  ... and 240 more"


def test_call_site_is_the_line_that_asks():
    assert call_site() == f"comm/test_call.py:{test_call_site_is_the_line_that_asks.__code__.co_firstlineno + 1}"
