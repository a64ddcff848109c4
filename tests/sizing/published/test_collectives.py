"""Published times of collectives within their bounds."""

import pytest

from tests.sizing.published.collectives import measured


@pytest.mark.parametrize("row", list(measured()), ids=lambda row: row.what)
def test_published_time_of_a_collective(row):
    assert row.holds, row


def test_a_time_out_of_range_would_not_hold():
    queries, lse, _ = measured()
    assert not type(queries)(queries.what, 40, 40, queries.ours, "us", 0.1).holds
    assert not type(lse)(lse.what, 7, 10, lse.ours, "us", 0).holds
