"""Keys that ranks store, counted card by card."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit.planner.shard import shard_kv
from tests.oracles import deal


@given(
    seq_lens=st.lists(st.integers(0, 5000), max_size=4),
    ratio=st.sampled_from([1, 2, 3, 4, 16, 128]),
    dcp_size=st.integers(1, 16),
    turn=st.integers(1, 16),
)
def test_every_key_lies_on_one_rank(seq_lens, ratio, dcp_size, turn):
    shards = shard_kv(np.array(seq_lens, np.int64), ratio, dcp_size=dcp_size, interleave=turn * ratio)
    # states made of tokens dealt one by one: a rank owns the states whose tokens it holds
    held = [[len(hand) // ratio for hand in deal(n - n % ratio, dcp_size, turn * ratio)] for n in seq_lens]
    assert shards.num_keys.tolist() == [sum(hand) for hand in held]
    assert shards.shard_keys.tolist() == [max(hand) for hand in held]
    for rank in range(dcp_size):
        assert shards.local_lens(rank).tolist() == [hand[rank] for hand in held]


@pytest.mark.parametrize(
    ("seq_len", "ratio", "num_keys"),
    [
        pytest.param(3, 4, 0, id="b105-no-whole-state"),
        pytest.param(4, 4, 1, id="b105-one-state"),
        pytest.param(7, 4, 1, id="b105-7"),
        pytest.param(8, 4, 2, id="b105-8"),
        pytest.param(4096 + 1945, 4, 1510, id="b91-offset-and-chunk-count"),
    ],
)
def test_states_of_a_context(seq_len, ratio, num_keys):
    shards = shard_kv(np.array([seq_len]), ratio, dcp_size=1, interleave=1)
    assert (shards.num_keys.tolist(), shards.shard_keys.tolist()) == ([num_keys], [num_keys])


def test_far_contexts_keep_64_bits():
    shards = shard_kv(np.array([1 << 40, 16_000_000, (1 << 31) + 1]), 4, dcp_size=16, interleave=64)
    assert shards.num_keys.tolist() == [1 << 38, 4_000_000, 1 << 29]
    assert shards.shard_keys.tolist() == [1 << 34, 250_000, 1 << 25]
    assert sum(shards.local_lens(rank) for rank in range(16)).tolist() == shards.num_keys.tolist()
