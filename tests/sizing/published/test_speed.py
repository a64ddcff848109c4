"""Published speed-ups of prefill under PCP, reproduced from the plans of both worlds."""

import pytest

from tests.sizing.published.speed import BOUND, speed_ups

JUDGED = [row for row in speed_ups() if row.is_judged]


@pytest.mark.parametrize("row", JUDGED, ids=lambda row: f"{row.model}-{row.length}")
def test_a_published_speed_up(row):
    before_s, after_s = row.ours_s()
    assert before_s / after_s == pytest.approx(row.published, rel=BOUND)


def test_splitting_more_queries_gains_more():
    lengths = {row.length: row for row in JUDGED if row.model == "deepseek-v4-flash"}
    gains = [before / after for before, after in (lengths[length].ours_s() for length in sorted(lengths))]
    assert gains == sorted(gains), "the replicated indexer weighs more the longer the prompt"
