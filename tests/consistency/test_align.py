"""The first place where ranks part: every kind, with two ranks and with a majority."""

import pytest

from cpkit.consistency.align import compare_lines, first_divergences
from cpkit.consistency.history import History, Stream
from tests.consistency.ranks import LOOP, A, B, C, line

GROUP = Stream("0", (0, 1))


def of_two(first, second):
    return compare_lines(GROUP, {0: first, 1: second})


@pytest.mark.parametrize(
    ("calls", "changes", "kind", "call"),
    [
        pytest.param([A, C, *LOOP], {}, "missing call", 2, id="left-out"),
        pytest.param([A, B, C, A, C], {}, "missing call", 5, id="left-out-and-ends-there"),
        pytest.param([A, B, B, C, A], {}, "extra call", 3, id="one-too-many"),
        pytest.param([A, C, B, A, B], {}, "order", 2, id="swapped"),
        pytest.param([A, B, ("all_to_all", "a.py:3")], {}, "operation", 3, id="other-operation"),
        pytest.param([A, B, C], {2: {"dtype": "float16"}}, "dtype", 2, id="other-dtype"),
        pytest.param([A, B, C], {1: {"size": 5}}, "size", 1, id="other-size"),
        pytest.param([A, B, C], {2: {"root": 1}}, "root", 2, id="other-root"),
        pytest.param([A, B], {}, "never came", 3, id="stopped-early"),
        pytest.param([], {}, "never came", 1, id="no-call-at-all"),
    ],
)
def test_kinds(calls, changes, kind, call):
    right = line(LOOP * 2)
    found = of_two(right, line(calls, changes=changes))
    assert (found.kind, found.call, found.odd) == (kind, call, (1,))
    three = compare_lines(Stream("0", (0, 1, 2)), {0: line(calls, changes=changes), 1: right, 2: right})
    assert (three.kind, three.call, three.odd) == (kind, call, (0,))
    assert three.counts == {0: len(calls), 1: 6, 2: 6}
    assert 0 in (three.behind if len(calls) < 6 else three.ahead)


@pytest.mark.parametrize("calls", [[], [A], LOOP * 50], ids=["none", "one", "many"])
def test_equal_calls_agree(calls):
    assert of_two(line(calls), line(calls)) is None


def test_sizes_of_an_uneven_call_may_differ_but_nothing_else():
    def a2a(size, dtype="int8"):
        return line([A, B], changes={1: {"size": size, "even": False, "dtype": dtype}})

    assert of_two(a2a(3), a2a(8)) is None
    assert of_two(a2a(3), a2a(8, "int16")).kind == "dtype"


def test_call_sites_alone_are_no_divergence():
    assert of_two(line([A, B]), line([("all_reduce", "b.py:9"), B])) is None


def test_of_equal_calls_the_line_that_was_skipped_is_found_by_call_sites():
    """All calls look alike on the wire, so that ranks part only where one has no more of them."""
    sites = [("all_reduce", f"a.py:{at}") for at in (10, 20, 30)]
    found = of_two(line(sites * 4), line([*sites, sites[0], *sites[2:], *sites * 2]))
    assert (found.kind, found.call, found.odd) == ("missing call", 5, (1,))
    assert found.said[0].entered.site == "a.py:20"


def test_a_legal_difference_of_sites_before_does_not_distract():
    def calls(first_site, *rest):
        return line([("broadcast", first_site), *rest])

    found = of_two(calls("a.py:1", A, B, C, A, B), calls("a.py:5", A, C, A, B))
    assert (found.kind, found.call) == ("missing call", 3)


def test_streams_are_in_order_of_their_first_parting():
    late, early = Stream("late", (0, 1)), Stream("early", (0, 1))
    histories = {rank: History("f", "r", rank, 2) for rank in (0, 1)}
    for rank, history in histories.items():
        for stream, first in ((late, 10), (early, 1)):
            calls = line([A] * (2 - rank))
            history.calls[stream] = {(i + 1, 0): one for i, one in enumerate(calls)}
            for at, one in enumerate(calls):
                object.__setattr__(one, "order", first + at)
    found, compared = first_divergences(histories)
    assert [one.stream.name for one in found] == ["early", "late"] and compared == 4


def test_a_rank_without_a_file_is_not_waited_for():
    histories = {0: History("f", "r", 0, 3, calls={Stream("0", (0, 2)): {(1, 0): line([A])[0]}})}
    assert first_divergences(histories) == ([], 1)
