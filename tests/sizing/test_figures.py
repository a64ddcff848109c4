"""A sum of figures tells how much of it is of which kind."""

import pytest

from cpkit.sizing.figures import Figure, add_up

TABLE, PEAKS, CHOSEN = (
    Figure(3.0, "measured", "a table"),
    Figure(2.0, "hardware", "peaks"),
    Figure(0.5, "assumed", "a choice"),
)


def test_one_kind_stays_what_it_is():
    total = add_up([TABLE, Figure(1.0, "measured", "another table")])
    assert total == Figure(4.0, "measured", "a table")
    assert total.words == "measured"


def test_a_mixed_sum_names_every_kind_with_its_share():
    total = add_up([PEAKS, TABLE, CHOSEN, PEAKS])
    assert (total.value, total.kind) == (7.5, "hardware")
    assert total.words == "hardware 53%, measured 40%, assumed 7%"
    assert [(part.kind, part.value) for part in total.by_kind] == [
        ("hardware", 4.0),
        ("measured", 3.0),
        ("assumed", 0.5),
    ]
    assert total.source == "peaks; a table; a choice"


def test_a_sum_of_mixed_sums_keeps_the_kinds_apart():
    total = add_up([add_up([TABLE, PEAKS]), add_up([CHOSEN, PEAKS])])
    assert {part.kind: part.value for part in total.by_kind} == {"hardware": 4.0, "measured": 3.0, "assumed": 0.5}
    assert sum(part.value for part in total.by_kind) == total.value


@pytest.mark.parametrize("figures", [[], [Figure(0.0, "measured", "a table")]], ids=["none", "zeros"])
def test_nothing_adds_up_to_nothing(figures):
    assert (add_up(figures).value, add_up(figures).words) == (0.0, "counted")
