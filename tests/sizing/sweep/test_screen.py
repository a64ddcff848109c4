"""Which of the deployments that can work are replayed, and what an average request spends on each."""

import pytest

from cpkit.errors import ConfigError
from cpkit.sizing.sweep.screen import gpu_seconds, screen, source_kinds
from tests.sizing.sweep.small import TRACE, make_allowed, make_setting


def test_screening_keeps_some_of_each_number_of_gpus():
    allowed, _ = make_allowed((8, 16))
    kept, left = screen(allowed, TRACE, make_setting(), 6)
    assert sorted(one.candidate.gpus for one in kept) == [8, 8, 8, 16, 16, 16]
    assert len(kept) + len(left) == len(allowed) and all("GPU-seconds" in one.reason for one in left)
    assert screen(allowed, TRACE, make_setting(), None) == (allowed, [])
    with pytest.raises(ConfigError, match="--limit 0: at least 1"):
        screen(allowed, TRACE, make_setting(), 0)


def test_the_one_that_spends_least_is_kept_first():
    allowed, _ = make_allowed()
    spent = [gpu_seconds(one, TRACE, make_setting()) for one in allowed]
    assert screen(allowed, TRACE, make_setting(), 1)[0] == [allowed[spent.index(min(spent))]]


def test_a_batch_budget_below_the_decodes_of_a_step():
    allowed, _ = make_allowed(batch_tokens=(1, 63))
    kept, left = screen(allowed, TRACE, make_setting(), 3)
    assert len(kept) == 3 and len(left) == len(allowed) - 3


def test_seconds_by_source_are_those_of_the_request():
    """Without overlap and on one rank, what the sources add up to is what a GPU spends, the GPUs being alike."""
    one = make_allowed()[0][0]
    ranks = one.memory.settings.topology.replica_size
    kinds = source_kinds(one, TRACE, make_setting())
    assert sum(kinds.values()) == pytest.approx(gpu_seconds(one, TRACE, make_setting()) / ranks)
