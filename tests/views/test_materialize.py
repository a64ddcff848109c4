"""What ranks store in a step, against keys placed one by one."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.batch import Batch
from cpkit.budget import Budget
from cpkit.errors import PlanError
from cpkit.model import load_model
from cpkit.step import plan_step
from cpkit.topology import Topology
from cpkit.views.materialize import gather_layout, stored_keys
from tests import worlds
from tests.oracles import block_slot, deal

V32 = load_model("deepseek-v3.2")


def with_tables(batch, topology, seed):
    """The batch with distinct blocks, enough for every request's largest shard."""
    widest = -(-int(batch.seq_lens.max(initial=0)) // topology.virtual_block)
    ids = np.random.default_rng(seed).permutation(batch.num_reqs * widest) + 1
    tables = ids.reshape(batch.num_reqs, widest).astype(np.int32)
    return Batch(batch.seq_lens, batch.query_lens, batch.prompt_lens, tables, batch.req_ids)


def owned(seq_len, topology, ratio):
    """Per DCP rank, the keys it holds in its own order: the states whose last token it was dealt."""
    if topology.dcp == 1:
        return [list(range(seq_len // ratio))]
    hands = deal(seq_len, topology.dcp, topology.interleave)
    return [[pos // ratio for pos in hand if pos % ratio == ratio - 1] for hand in hands]


@settings(max_examples=60)
@given(data=st.data(), ratio=st.sampled_from(worlds.RATIOS), seed=st.integers(0, 99))
def test_every_new_key_is_stored_once_in_a_dcp_group(data, ratio, seed):
    topology = data.draw(worlds.topologies(ratio=ratio))
    batch = with_tables(data.draw(worlds.batches()), topology, seed)
    model = worlds.made_up_model(ratio, topology.tp * topology.dcp)
    plan = plan_step(batch, topology, model, data.draw(worlds.budgets(topology)))
    computed, seq_lens = batch.num_computed.tolist(), batch.seq_lens.tolist()
    truth = [owned(seq_len, topology, ratio) for seq_len in seq_lens]
    for group in topology.groups("dcp")[:2]:
        stored = Counter()
        for dcp_rank, rank in enumerate(group):
            keys = stored_keys(plan, plan.rank(rank), ratio)
            rows = list(zip(keys.req.tolist(), keys.key.tolist(), keys.slot.tolist(), strict=True))
            expected = [
                (req, key, block_slot(batch.block_tables[req].tolist(), place, topology.block_size // ratio))
                for req in range(batch.num_reqs)
                for place, key in enumerate(truth[req][dcp_rank])
                if key >= computed[req] // ratio
            ]
            assert rows == expected
            assert len(set(keys.slot.tolist())) == len(rows)
            stored.update((req, key) for req, key, _ in rows)
        new = [
            (req, key) for req in range(batch.num_reqs) for key in range(computed[req] // ratio, seq_lens[req] // ratio)
        ]
        assert stored == Counter(new)


@pytest.mark.parametrize(
    ("dcp_rank", "keys", "slots"),
    [pytest.param(0, [4, 6], [18, 19], id="rank-0"), pytest.param(1, [3, 5], [15, 18], id="rank-1")],
)
def test_drawn_example(dcp_rank, keys, slots):
    batch = Batch.from_lens([7], [4], block_tables=[[7, 9]])
    plan = plan_step(batch, Topology(tp=2, dcp=2, block_size=2), V32, Budget(100))
    stored = stored_keys(plan, plan.ranks[dcp_rank], 1)
    assert (stored.req.tolist(), stored.key.tolist(), stored.slot.tolist()) == ([0, 0], keys, slots)


def test_restore_undoes_the_gather():
    batch = Batch.from_lens([8, 7], [1, 7], [6, 7])
    layout = gather_layout(plan_step(batch, Topology(pcp=2), V32, Budget(100)))
    flat = np.arange(8) * 10
    assert flat[layout.gather_idx][layout.restore_idx].tolist() == flat.tolist()
    assert layout.padded == 4


@settings(max_examples=40)
@given(data=st.data(), partition=st.sampled_from(["head_tail", "head_tail_even", "contiguous", "round_robin"]))
def test_any_gather_is_undone(data, partition):
    topology = data.draw(worlds.topologies())
    batch = data.draw(worlds.batches())
    model = worlds.made_up_model(1, topology.tp * topology.dcp)
    plan = plan_step(batch, topology, model, data.draw(worlds.budgets(topology)), partition=partition)
    layout = gather_layout(plan)
    assert layout.padded == plan.padded
    flat = np.random.default_rng(0).permutation(batch.num_tokens)
    if batch.num_tokens:
        assert (flat[layout.gather_idx][layout.restore_idx] == flat).all()
    # rank r's part of the gathered rows is what rank r computes, in its order
    start = batch.query_start_loc[:-1] - batch.num_computed
    for rank in plan.ranks[:: topology.tp]:
        mine = layout.gather_idx[rank.pcp_rank * plan.padded :][: rank.rows.total_tokens]
        rows = rank.rows
        assert mine.tolist() == ((start[rows.reqs()] + rows.positions()).tolist() if rows.total_tokens else [])


def test_without_block_tables_there_are_no_slots():
    plan = plan_step(Batch.from_lens([5], [5]), Topology(), V32, Budget(100))
    stored = stored_keys(plan, plan.ranks[0], 1)
    assert (stored.key.tolist(), stored.slot) == ([0, 1, 2, 3, 4], None)


def test_empty_batch_stores_nothing():
    batch = Batch.from_lens([], [], block_tables=[])
    stored = stored_keys(plan := plan_step(batch, Topology(tp=2, dcp=2), V32, Budget(100)), plan.ranks[1], 1)
    assert (stored.req.tolist(), stored.key.tolist(), stored.slot.tolist()) == ([], [], [])


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        pytest.param([[3, 0]], r"request 0: position 8 lies in entry 1 .*null block 0", id="null-block"),
        pytest.param([[3]], "request 0: position 8 needs entry 1 .* 1 wide: allocate its blocks", id="too-narrow"),
        pytest.param([[]], "request 0: position 0 needs entry 0 .* 0 wide", id="no-blocks"),
    ],
)
def test_keys_without_a_block_are_refused(tables, words):
    sound = plan_step(Batch.from_lens([9], [9]), Topology(tp=2, dcp=2, block_size=4), V32, Budget(100))
    plan = dataclasses.replace(sound, batch=Batch.from_lens([9], [9], block_tables=tables))
    with pytest.raises(PlanError, match=words):
        stored_keys(plan, plan.ranks[0], 1)


def test_far_slots_keep_64_bits():
    tables = np.full((1, 4000), (1 << 31) - 1, np.int32)
    batch = Batch.from_lens([16_000_000], [1], block_tables=tables)
    topology = Topology(tp=2, dcp=2, block_size=1 << 12)
    plan = plan_step(batch, topology, V32, Budget(1 << 25))
    stored = stored_keys(plan, plan.ranks[1], 1)
    assert (stored.key.tolist(), stored.slot.tolist()) == (
        [15_999_999],
        [((1 << 31) - 1) * 4096 + 7_999_999 % 4096],
    )


@pytest.mark.parametrize(
    ("position", "interleave", "block_size", "rank", "local"),
    [
        pytest.param(1500, 1024, 1024, 1, 476, id="b45-turn-of-1024"),
        pytest.param(1536, 1, 1536, 0, 768, id="b53-turn-of-1"),
        pytest.param(1536, 1536, 1536, 1, 0, id="b53-turn-of-1536"),
    ],
)
def test_owner_of_a_position(position, interleave, block_size, rank, local):
    topology = Topology(tp=2, dcp=2, interleave=interleave, block_size=block_size)
    batch = Batch.from_lens([position + 1], [1], block_tables=[[1]])
    plan = plan_step(batch, topology, V32, Budget(1 << 20))
    slots = [stored_keys(plan, plan.ranks[r], 1).slot.tolist() for r in range(2)]
    expected = [[], []]
    expected[rank] = [block_size + local]
    assert slots == expected


def test_b105_states_are_stored_when_their_last_token_comes():
    model = worlds.made_up_model(4, 1)
    for seq_len, new in ((3, []), (4, [0]), (7, []), (8, [1])):
        plan = plan_step(Batch.from_lens([seq_len], [1]), Topology(), model, Budget(100))
        assert stored_keys(plan, plan.ranks[0], 4).key.tolist() == new


def test_b59_block_ids_span_the_dcp_group():
    batch = Batch.from_lens([64], [64], block_tables=[[5, 6]])
    plan = plan_step(batch, Topology(tp=2, dcp=2, block_size=16, interleave=16), V32, Budget(100))
    for rank in plan.ranks:
        slots = stored_keys(plan, rank, 1).slot
        assert sorted(set((slots // 16).tolist())) == [5, 6]
        assert len(slots) == 32
