"""Who sits where, against the group tables of the engines, and worlds that cannot be."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit.errors import ConfigError
from cpkit.topology import GROUPS, Coords, Shard, Topology, gathered_heads, legal_dcp_sizes


def as_lists(groups):
    return [list(group) for group in groups]


@pytest.mark.parametrize(
    ("sizes", "tp", "pcp", "dcp"),
    [
        pytest.param({"tp": 8, "dcp": 2}, [list(range(8))], [[r] for r in range(8)],
                     [[0, 1], [2, 3], [4, 5], [6, 7]], id="tp8-dcp2"),
        pytest.param({"tp": 8, "dcp": 8}, [list(range(8))], [[r] for r in range(8)], [list(range(8))], id="tp8-dcp8"),
        pytest.param({"tp": 4, "pcp": 2, "dcp": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]],
                     [[0, 4], [1, 5], [2, 6], [3, 7]], id="tp4-pcp2-dcp2"),
        pytest.param({"tp": 4, "pcp": 2, "dcp": 8}, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]],
                     [[0, 4, 1, 5, 2, 6, 3, 7]], id="tp4-pcp2-dcp8"),
        pytest.param({"tp": 2, "pcp": 4, "dcp": 8}, [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]],
                     [[0, 2, 4, 6, 1, 3, 5, 7]], id="tp2-pcp4-dcp8"),
        pytest.param({"dp": 2, "tp": 2, "pcp": 2, "dcp": 4}, [[0, 1], [2, 3], [4, 5], [6, 7]],
                     [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 2, 1, 3], [4, 6, 5, 7]], id="dp2-tp2-pcp2-dcp4"),
        pytest.param({"tp": 2, "pcp": 2, "dcp": 2}, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2], [1, 3]],
                     id="tp2-pcp2-dcp2"),
        pytest.param({}, [[0]], [[0]], [[0]], id="one-rank"),
    ],
)  # fmt: skip
def test_groups_of_the_engine_tables(sizes, tp, pcp, dcp):
    topology = Topology(**sizes)
    assert [as_lists(topology.groups(name)) for name in ("tp", "pcp", "dcp")] == [tp, pcp, dcp]


def test_groups_of_the_slow_axes():
    topology = Topology(dp=2, pp=2, pcp=2, tp=1)
    assert as_lists(topology.groups("pp")) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert as_lists(topology.groups("dp")) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert as_lists(topology.groups("world")) == [list(range(8))]


@st.composite
def topologies(draw):
    tp, pcp = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    if tp * pcp > 64:
        tp = 64 // pcp
    dcp = draw(st.sampled_from(legal_dcp_sizes(tp, pcp)))
    return Topology(dp=draw(st.integers(1, 3)), pp=draw(st.integers(1, 3)), pcp=pcp, tp=tp, dcp=dcp)


@given(topology=topologies())
def test_a_rank_stands_in_its_groups_where_its_shard_says(topology):
    for rank in range(topology.world_size):
        shard = topology.shard_of(rank)
        for name, size, place in (("pcp", shard.pcp_size, shard.pcp_rank), ("dcp", shard.dcp_size, shard.dcp_rank)):
            group = topology.group_of(name, rank)
            assert (len(group), group[place]) == (size, rank)
    assert Topology(tp=2, dcp=2, interleave=4).shard_of(1) == Shard(dcp_size=2, dcp_rank=1, interleave=4)


def test_places_that_do_not_exist():
    with pytest.raises(ConfigError, match="dcp_rank=2 with dcp_size=2"):
        Shard(dcp_size=2, dcp_rank=2)
    with pytest.raises(ConfigError, match="pcp_rank=-1 with pcp_size=1"):
        Shard(pcp_rank=-1)
    with pytest.raises(ConfigError, match="interleave=0"):
        Shard(interleave=0)


@given(topology=topologies())
def test_ranks_count_through_the_axes(topology):
    axes = [range(topology.dp), range(topology.pp), range(topology.pcp), range(topology.tp)]
    places = list(itertools.product(*axes))  # the last axis is the fastest
    assert topology.world_size == len(places)
    for rank, place in enumerate(places):
        assert topology.coords(rank) == place
        assert topology.rank_of(Coords(*place)) == rank


@given(topology=topologies())
def test_every_kind_of_group_holds_each_rank_once(topology):
    for name in GROUPS:
        groups = topology.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        size = topology.world_size if name == "world" else getattr(topology, name)
        assert {len(group) for group in groups} == {size}
        for group in groups:
            assert all(topology.group_of(name, rank) == group for rank in group)
    for group in topology.groups("dcp"):
        assert [topology.dcp_rank(rank) for rank in group] == list(range(topology.dcp))
        assert len({topology.coords(rank)[:2] for rank in group}) == 1  # never across replicas or stages
    for group in topology.groups("pcp"):
        if topology.dcp > 1 and topology.pcp > 1:
            assert set(group) <= set(topology.group_of("dcp", group[0]))


@pytest.mark.parametrize(
    ("tp", "pcp", "sizes"),
    [(1, 1, [1]), (6, 1, [1, 2, 3, 6]), (8, 1, [1, 2, 4, 8]), (1, 4, [1, 4]), (4, 2, [1, 2, 8]), (2, 3, [1, 3, 6])],
)
def test_legal_dcp_sizes(tp, pcp, sizes):
    assert legal_dcp_sizes(tp, pcp) == sizes
    for dcp in range(1, 2 * tp * pcp + 1):
        if dcp in sizes:
            assert Topology(tp=tp, pcp=pcp, dcp=dcp).dcp == dcp
        else:
            with pytest.raises(ConfigError, match=rf"dcp={dcp} with tp={tp} pcp={pcp}.*one of \[1"):
                Topology(tp=tp, pcp=pcp, dcp=dcp)


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (1, 4), (2, 1), (6, 1), (2, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("own", [1, 3, 16])
def test_heads_that_the_ranks_of_a_dcp_group_hold_together(tp, pcp, own):
    for dcp in legal_dcp_sizes(tp, pcp):
        topology = Topology(tp=tp, pcp=pcp, dcp=dcp)
        for group in topology.groups("dcp"):
            held = {own * topology.coords(rank).tp + head for rank in group for head in range(own)}
            assert gathered_heads(own, tp=tp, pcp=pcp, dcp=dcp) == len(held)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        pytest.param({"tp": 8, "dcp": 3}, r"dcp=3 with tp=8 pcp=1: .*divisor of tp, one of \[1, 2, 4, 8\]",
                     id="b135-error-lists-the-legal-sizes"),
        pytest.param({"tp": 4, "pcp": 2, "dcp": 4}, r"1, pcp or tp \* pcp, one of \[1, 2, 8\]", id="part-of-the-block"),
        pytest.param({"interleave": 3}, r"interleave=3 does not divide block_size=64: .*\[1, 2, 4, 8",
                     id="interleave-3"),
        pytest.param({"interleave": 128}, r"interleave=128 does not divide block_size=64", id="interleave-above-block"),
        pytest.param({"tp": 0}, r"tp=0: .*from 1 to 2\^20", id="zero"),
        pytest.param({"pcp": -2}, "pcp=-2: ", id="negative"),
        pytest.param({"tp": 2.0}, r"tp=2\.0: ", id="float"),
        pytest.param({"dp": True}, "dp=True: ", id="bool"),
        pytest.param({"pp": "2"}, "pp='2': ", id="string"),
        pytest.param({"dcp": None}, "dcp=None: ", id="none"),
        pytest.param({"block_size": float("nan")}, "block_size=nan: ", id="nan"),
        pytest.param({"block_size": (1 << 20) + 1}, "block_size=1048577: ", id="too-large"),
        pytest.param({"tp": 10**300}, "tp=10000", id="huge"),
    ],
)  # fmt: skip
def test_worlds_that_cannot_be(sizes, words):
    with pytest.raises(ConfigError, match=words):
        Topology(**sizes)


def test_b55_virtual_block_is_scaled_once():
    assert Topology(tp=4, dcp=4, block_size=256).virtual_block == 1024


def test_b65_stage_base_counts_the_pcp_axis():
    topology = Topology(pp=2, pcp=2, tp=4)
    assert topology.rank_of(Coords(dp=0, pp=1, pcp=0, tp=0)) == 8
    assert topology.rank_of(Coords(dp=0, pp=0, pcp=1, tp=0)) == 4


def test_b39_last_stage_reaches_all_of_its_pcp_ranks():
    topology = Topology(pp=2, pcp=2)
    stage = [rank for rank in range(4) if topology.coords(rank).pp == 1]
    assert topology.group_of("pcp", stage[0]) == tuple(stage) == (2, 3)
    assert topology.group_of("world", 2) == (0, 1, 2, 3)


@pytest.mark.parametrize("rank", [-1, 8, 1 << 40])
def test_ranks_outside_the_world(rank):
    topology = Topology(tp=8)
    for ask in (topology.coords, topology.dcp_rank, lambda r: topology.group_of("tp", r)):
        with pytest.raises(ConfigError, match=rf"rank {rank} is not in this world of 8 ranks \(0\.\.7\)"):
            ask(rank)


def test_places_outside_the_world():
    with pytest.raises(ConfigError, match=r"pcp rank 2 is not in 0\.\.1"):
        Topology(pcp=2).rank_of(Coords(0, 0, 2, 0))


def test_unknown_group_names_the_groups():
    with pytest.raises(ConfigError, match="no group 'ep': the groups are world, dp, pp, pcp, tp, dcp"):
        Topology().groups("ep")


def test_a_topology_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology().tp = 2
    assert Topology(tp=2) == Topology(tp=2) != Topology(tp=4)


def test_world_is_bounded():
    assert Topology(tp=8, pcp=1 << 13).world_size == 1 << 16
    with pytest.raises(ConfigError, match="world of 131072 ranks: worlds have at most 65536"):
        Topology(tp=16, pcp=1 << 13)
