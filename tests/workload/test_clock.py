"""The step clock against a walk over (query token, key) pairs."""

import pytest

from cpkit.batch import Batch
from cpkit.errors import ConfigError
from cpkit.workload import StepClock


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [([1], [1]), ([9, 6], [1, 4]), ([7, 7, 3], [1, 1, 3]), ([100], [100])],
)
def test_seconds_count_tokens_and_pairs(seq_lens, query_lens):
    pairs = sum(
        1
        for seq, query in zip(seq_lens, query_lens, strict=True)
        for pos in range(seq - query, seq)
        for _ in range(pos + 1)
    )
    clock = StepClock(step_s=1.0, token_s=0.125, pair_s=0.5)
    assert clock.step_seconds(Batch.from_lens(seq_lens, query_lens)) == 1.0 + 0.125 * sum(query_lens) + 0.5 * pairs


def test_huge_contexts_do_not_wrap():
    batch = Batch.from_lens([1 << 40] * 4, [1 << 30] * 4)
    assert StepClock(1.0, 0.0, 1.0).step_seconds(batch) == pytest.approx(4 * 2.0**70, rel=1e-3)


@pytest.mark.parametrize("bad", [(0, 0, 0), (-1, 0, 0), (1, -1, 0), (1, 0, float("nan")), (float("inf"), 0, 0)])
def test_costs_below_zero_or_not_finite_are_refused(bad):
    with pytest.raises(ConfigError, match="StepClock"):
        StepClock(*bad)
