"""Which rank stores a key, and where, against tokens dealt out like cards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit.planner.interleave import join_position, largest_shard, local_lens, split_position
from tests.oracles import deal

WORLDS = [
    pytest.param(1, 1, id="no-dcp"),
    pytest.param(2, 1, id="interleave-1"),
    pytest.param(4, 64, id="block-interleave"),
    pytest.param(3, 5, id="odd-sizes"),
    pytest.param(16, 128, id="widest"),
]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize(("dcp_size", "interleave"), WORLDS)
def test_positions_and_lens_follow_the_deal(length, dcp_size, interleave):
    pos = np.arange(length)
    owner, local = split_position(pos, dcp_size, interleave)
    held = deal(length, dcp_size, interleave)
    for rank, cards in enumerate(held):
        assert pos[owner == rank].tolist() == cards
        assert local[owner == rank].tolist() == list(range(len(cards)))
        assert local_lens(np.array([length]), rank, dcp_size, interleave).tolist() == [len(cards)]
    assert (join_position(owner, local, dcp_size, interleave) == pos).all()
    assert largest_shard(np.array([length]), dcp_size, interleave).tolist() == [max(map(len, held))]
    assert largest_shard(length, dcp_size, interleave) == len(held[0])


@given(length=st.integers(0, 5000), dcp_size=st.integers(1, 16), interleave=st.integers(1, 128))
def test_any_world(length, dcp_size, interleave):
    held = deal(length, dcp_size, interleave)
    lens = local_lens(np.array([length]), np.arange(dcp_size), dcp_size, interleave)
    assert lens.tolist() == [len(cards) for cards in held]
    owner, local = split_position(np.arange(length), dcp_size, interleave)
    truth = {key: (rank, place) for rank, cards in enumerate(held) for place, key in enumerate(cards)}
    assert list(zip(owner.tolist(), local.tolist(), strict=True)) == [truth[key] for key in range(length)]


@given(
    states=st.integers(0, 600),
    dcp_size=st.integers(1, 16),
    turn=st.integers(1, 16),
    ratio=st.sampled_from([2, 3, 4, 16, 128]),
    rest=st.integers(0, 127),
)
def test_states_may_be_localised_before_or_after_the_division(states, dcp_size, turn, ratio, rest):
    tokens = np.array([states * ratio + rest % ratio])
    for rank in range(dcp_size):
        early = local_lens(tokens, rank, dcp_size, turn * ratio) // ratio
        late = local_lens(tokens // ratio, rank, dcp_size, turn)
        assert early.tolist() == late.tolist()


@given(length=st.integers(0, 1 << 40), dcp_size=st.integers(1, 256), interleave=st.integers(1, 1 << 20))
def test_far_positions_add_up_and_come_back(length, dcp_size, interleave):
    lens = local_lens(np.array([length]), np.arange(dcp_size), dcp_size, interleave)
    assert sum(lens.tolist()) == length
    assert largest_shard(np.array([length]), dcp_size, interleave).item() == max(lens.tolist()) == lens[0]
    owner, local = split_position(np.array([length]), dcp_size, interleave)
    plain_owner, plain_local = split_position(length, dcp_size, interleave)
    assert (owner.item(), local.item()) == (plain_owner, plain_local)
    assert plain_owner == length // interleave % dcp_size
    assert join_position(owner, local, dcp_size, interleave).item() == length


@pytest.mark.parametrize(
    ("position", "dcp_size", "interleave", "owner", "local"),
    [
        pytest.param(1500, 2, 1024, 1, 476, id="b45-interleave-above-the-kernel-block"),
        pytest.param(1536, 8, 1, 0, 192, id="b53-interleave-1"),
        pytest.param(1536, 8, 1536, 1, 0, id="b53-interleave-1536"),
    ],
)
def test_owner_and_local_index(position, dcp_size, interleave, owner, local):
    assert split_position(position, dcp_size, interleave) == (owner, local)


@pytest.mark.parametrize(
    ("lens", "dcp_size", "shards"),
    [
        pytest.param([8, 9, 10], 2, [[4, 5, 5], [4, 4, 5]], id="b67-each-draft-token-by-its-own-length"),
        pytest.param([16], 4, [[4], [4], [4], [4]], id="b73-context-without-the-query"),
        pytest.param([8, 11], 2, [[4, 6], [4, 5]], id="b71-second-context-chunk-is-the-difference"),
        pytest.param([5, 9, 0], 2, [[3, 5, 0], [2, 4, 0]], id="b133-lanes-of-unequal-length"),
    ],
)
def test_local_lens(lens, dcp_size, shards):
    assert [local_lens(np.array(lens), rank, dcp_size, 1).tolist() for rank in range(dcp_size)] == shards


def test_b103_local_ids_become_global_before_the_merge():
    assert join_position(1, np.array([0, 1, 2, 3]), 2, 2).tolist() == [2, 3, 6, 7]
