"""Whole steps: every rank planned alone agrees with all planned together, and the promises hold on random worlds."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.batch import Batch
from cpkit.budget import Budget, default_budget
from cpkit.errors import ConfigError, PlanError
from cpkit.model import load_model
from cpkit.planner.partition import STRATEGIES
from cpkit.step import plan_step
from cpkit.topology import Topology
from tests import worlds

V32 = load_model("deepseek-v3.2")


def same(one, other):
    """Equal values, all the way down."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        fields = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in fields)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@st.composite
def steps(draw, sizes=worlds.PARALLEL_SIZES, longest=5000):
    """Arguments of plan_step."""
    ratio, pool = draw(st.sampled_from(worlds.RATIOS)), draw(st.sampled_from([1, 1, 2]))
    topology = draw(worlds.topologies(sizes, ratio * pool))
    model = worlds.made_up_model(ratio, num_heads=topology.tp * topology.dcp, pool=pool)
    options = {"partition": draw(st.sampled_from(STRATEGIES)), "merge": draw(st.sampled_from(["ag_rs", "a2a"]))}
    if topology.dcp == 1:
        options["shard_decode_requests"] = draw(st.sampled_from([None, True, False]))
    return (draw(worlds.batches(longest)), topology, model, draw(worlds.budgets(topology))), options


@settings(max_examples=40)
@given(step=steps())
def test_ranks_planned_alone_agree(step):
    args, options = step
    together = plan_step(*args, **options)
    assert [plan.rank for plan in together.ranks] == list(range(args[1].replica_size))
    for rank in range(0, args[1].replica_size, 1 + args[1].replica_size // 5):
        alone = plan_step(*args, rank=rank, **options)
        assert same(alone.ranks, (together.rank(rank),))
        assert alone.digests() == together.digests()
        for field in ("padded", "partition", "shards", "collectives"):
            assert same(getattr(alone, field), getattr(together, field)), field


@settings(max_examples=40)
@given(step=steps(worlds.BOTH))
def test_ranks_that_gather_together_agree_on_every_chunk(step):
    args, options = step
    plan = plan_step(*args, **options)
    lead = plan.ranks[0]
    for rank in plan.ranks:
        assert same(rank.chunks, lead.chunks)
        assert same(rank.gathers, lead.gathers)
        assert rank.rows.num_decodes == lead.rows.num_decodes
        assert rank.rows.req.tolist() == lead.rows.req.tolist()


@settings(max_examples=40)
@given(step=steps())
def test_every_query_token_is_computed_once_or_by_all(step):
    args, options = step
    batch, topology = args[:2]
    plan = plan_step(*args, **options)
    computed = Counter()
    for rank in plan.ranks[:: topology.tp]:
        assert rank.rows.total_tokens == plan.partition.num_tokens[rank.pcp_rank] <= plan.padded
        computed.update(zip(rank.rows.reqs().tolist(), rank.rows.positions().tolist(), strict=True))
    spans = zip(batch.num_computed.tolist(), batch.seq_lens.tolist(), strict=True)
    assert set(computed) == {(req, pos) for req, (start, stop) in enumerate(spans) for pos in range(start, stop)}
    assert all(n == (topology.pcp if plan.partition.replicated[req] else 1) for (req, _), n in computed.items())
    for rank in plan.ranks:  # TP ranks compute the same tokens, each its own heads
        assert rank.pcp_rank == rank.rank // topology.tp
        assert same(rank.rows, plan.ranks[rank.pcp_rank * topology.tp].rows)


@settings(max_examples=40)
@given(step=steps(longest=60))
def test_every_query_meets_every_key_it_may_see_once(step):
    args, options = step
    plan = plan_step(*args, **options)
    ratio = plan.model.ratios[0]
    for rank in plan.ranks[:: args[1].tp]:
        rows = rank.rows
        tokens = list(zip(rows.reqs().tolist(), rows.positions().tolist(), strict=True))
        start = rows.query_start_loc.tolist()
        met = [Counter() for _ in tokens]
        for chunk in rank.chunks[ratio]:
            first, last = (start[rows.num_decodes + row] for row in (chunk.row_start, chunk.row_stop))
            for begin, stop in chunk.runs():
                for place in range(min(first + begin, last), min(first + stop, last)):
                    met[place].update(range(chunk.key_start, chunk.key_stop))
        for place in range(rows.num_decode_tokens, len(tokens)):
            visible = set(range((tokens[place][1] + 1) // ratio))
            assert all(met[place][key] == 1 for key in visible)
        assert not any(met[: rows.num_decode_tokens])


@settings(max_examples=40)
@given(step=steps())
def test_no_chunk_exceeds_a_budget(step):
    args, options = step
    _, topology, model, budget = args
    plan = plan_step(*args, **options)
    for rank in plan.ranks:
        for ratio in model.ratios:
            unit = topology.dcp * (topology.interleave // ratio) if topology.dcp > 1 else 1
            for chunk in rank.chunks[ratio]:
                assert 0 < chunk.num_keys <= budget.workspace_tokens // ratio
                assert 0 < chunk.peak_logits * 4 <= budget.logits_bytes
                assert chunk.key_start % unit == 0
            both = topology.pcp > 1 and topology.dcp > 1
            assert len(rank.gathers[ratio]) == (len(rank.chunks[ratio]) if both else 0)
            for chunk, gather in zip(rank.chunks[ratio] if both else (), rank.gathers[ratio], strict=True):
                assert gather.num_keys == chunk.num_keys


FIELD_CHANGES = [
    pytest.param(
        {"seq_lens": [301, 641]}, {"seq_lens", "shard_keys", "chunks", "gathers", "collectives"}, id="seq_lens"
    ),
    pytest.param({"query_lens": [1, 511]}, {"query_lens", "partition"}, id="query_lens"),
    pytest.param({"query_lens": [1, 256]}, {"query_lens", "partition", "padded", "chunks", "collectives"}, id="shares"),
    pytest.param({"prompt_lens": [299, 640]}, {"prompt_lens"}, id="prompt_lens"),
    pytest.param({"req_ids": [0, 2]}, {"req_ids"}, id="req_ids"),
    pytest.param({"block_tables": [[1, 2, 3], [4, 5, 6, 7, 8, 10]]}, {"block_tables"}, id="block_tables"),
    pytest.param({"topology": Topology(tp=2, pcp=2, dcp=2, block_size=128)}, {"topology"}, id="topology"),
    pytest.param({"model": load_model("glm-5")}, {"model", "collectives"}, id="model"),
    pytest.param({"budget": Budget(1 << 20, max_num_seqs=9)}, {"budget"}, id="budget"),
    pytest.param({"budget": Budget(512)}, {"budget", "chunks", "gathers", "collectives"}, id="budget-that-cuts"),
    pytest.param({"merge": "a2a"}, {"merge", "collectives"}, id="merge"),
    pytest.param({"partition": "head_tail_even"}, {"partition"}, id="partition"),
]


@pytest.mark.parametrize(("change", "fields"), FIELD_CHANGES)
def test_a_change_shows_in_its_own_digest(change, fields):
    def digests(**changed):
        lens = {"seq_lens": [300, 640], "query_lens": [1, 512], "prompt_lens": [298, 640],
                "req_ids": [0, 1], "block_tables": [[1, 2, 3], [4, 5, 6, 7, 8, 9]]}  # fmt: skip
        args = {"topology": Topology(tp=2, pcp=2, dcp=2), "model": V32, "budget": Budget(1 << 20)}
        options = {key: changed.get(key, value) for key, value in {"partition": "head_tail", "merge": "ag_rs"}.items()}
        batch = Batch.from_lens(**{key: changed.get(key, value) for key, value in lens.items()})
        args = {key: changed.get(key, value) for key, value in args.items()}
        return plan_step(batch, **args, **options).digests()

    before, after = digests(), digests(**change)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == fields


def test_every_digest_has_a_change_that_moves_it():
    plan = plan_step(Batch.from_lens([640], [512]), Topology(pcp=2, dcp=2), V32, Budget(1 << 20))
    assert set(plan.digests()) == set().union(*(param.values[1] for param in FIELD_CHANGES))


PINNED = {
    "seq_lens": "327b609a4bfc453a",
    "query_lens": "80cbfde9679bc810",
    "prompt_lens": "b79e30b07738cb1c",
    "req_ids": "1e7513ca5d4a89df",
    "block_tables": "225b62a351f1f7a9",
    "topology": "4639be3be23d74fe",
    "model": "f8903af391c6e142",
    "budget": "722d8c790540e5b0",
    "merge": "3eab2eaf9420dbe6",
    "partition": "fa8a9a3b38acd33d",
    "padded": "0d8f90433e2cc68d",
    "shard_keys": "3947ab2706e3179f",
    "collectives": "e0a1bac09c7b1d96",
    "chunks": "9bbd4e59281f0e8c",
    "gathers": "107a39a5746f9927",
}


def test_digests_are_pinned():
    batch = Batch.from_lens([301, 1001, 640], [1, 2, 512], [300, 999, 640], block_tables=[[1], [2, 3], [4]])
    topology = Topology(tp=2, pcp=2, dcp=4, interleave=128, block_size=256)
    budget = Budget(1 << 20, num_speculative_tokens=1)
    assert plan_step(batch, topology, load_model("deepseek-v4-flash"), budget).digests() == PINNED


@pytest.mark.parametrize(
    "world", [{}, {"tp": 4, "dcp": 2}, {"pcp": 4}, {"pcp": 4, "dcp": 4}, {"tp": 2, "pcp": 2, "dcp": 4}]
)
@pytest.mark.parametrize(("seq", "query"), [([], []), ([0], [0]), ([7, 0], [0, 0])], ids=["empty", "null", "idle"])
def test_steps_without_tokens(world, seq, query):
    topology = Topology(**world)
    plan = plan_step(Batch.from_lens(seq, query), topology, V32, Budget(100))
    assert len(plan.ranks) == topology.replica_size
    assert (plan.padded, plan.collectives.step, set(plan.collectives.layers)) == (0, (), {()})
    for rank in plan.ranks:
        assert (rank.rows.req.tolist(), rank.rows.total_tokens, rank.chunks, rank.rows.logits_idx.tolist()) == (
            [0], 0, {1: ()}, [-1],
        )  # fmt: skip


@pytest.mark.parametrize("partition", STRATEGIES)
def test_b01_two_token_prefill_leaves_no_rank_out(partition):
    topology = Topology(pcp=2, dcp=2)
    alone = [
        plan_step(Batch.from_lens([2], [2]), topology, V32, Budget(100), rank=r, partition=partition) for r in (0, 1)
    ]
    assert alone[0].digests() == alone[1].digests()
    assert [c.what for c in alone[0].collectives.layers[0]] == ["kv_latent", "index_key", "index_keys", "latent_rows"]


def test_ranks_agree_on_the_decodes_of_a_resumed_request():
    # after a preemption: rank 0 gets the pieces [0, 2) and [6, 8), rank 1 [2, 6), all past the prompt of 1 token
    batch = Batch.from_lens([8], [8], [1])
    budget = Budget(1 << 20, num_speculative_tokens=3)
    alone = [plan_step(batch, Topology(pcp=2, dcp=2), V32, budget, rank=rank) for rank in range(2)]
    assert [plan.ranks[0].rows.num_decodes for plan in alone] == [0, 0]
    assert alone[0].digests() == alone[1].digests()


def test_b31_an_idle_rank_keeps_its_place():
    plan = plan_step(Batch.from_lens([5], [5]), Topology(pcp=4), V32, Budget(100), partition="contiguous")
    assert plan.partition.num_tokens.tolist() == [2, 2, 1, 0]
    assert [rank.rows.total_tokens for rank in plan.ranks] == [2, 2, 1, 0]


def test_b41_b43_ranks_agree_on_what_a_draft_row_is():
    batch = Batch.from_lens([100, 200], [4, 4], [90, 190])
    for threshold, decodes in ((3, 2), (0, 0)):
        plan = plan_step(batch, Topology(tp=4, dcp=4), V32, Budget(1 << 20, num_speculative_tokens=threshold))
        assert {(rank.rows.num_decodes, len(rank.rows.req)) for rank in plan.ranks} == {(decodes, 2)}


def test_b53_interleave_is_in_the_digest():
    batch = Batch.from_lens([2000], [1])
    one, other = (
        plan_step(batch, Topology(tp=8, dcp=8, interleave=i, block_size=1536), V32, Budget(1 << 20)).digests()
        for i in (1, 1536)
    )
    assert one["topology"] != other["topology"] and one["shard_keys"] != other["shard_keys"]


def test_b81_workspace_is_counted_in_states():
    budget = Budget(1024, logits_bytes=4 << 20)
    model = worlds.made_up_model(4, 1)
    plan = plan_step(Batch.from_lens([400] * 3, [10] * 3), Topology(), model, budget)
    assert [(c.row_start, c.row_stop, c.num_keys) for c in plan.ranks[0].chunks[4]] == [(0, 2, 200), (2, 3, 100)]


def test_b85_rank_without_query_tokens_has_the_same_collectives():
    plan = plan_step(
        Batch.from_lens([64] * 4, [1] * 4, [64] * 4), Topology(pcp=8), V32, Budget(1000), partition="head_tail"
    )
    assert [rank.rows.total_tokens for rank in plan.ranks] == [4] + [0] * 7
    assert plan.ranks[5].chunks == {1: ()}
    assert [c.elements for c in plan.collectives.layers[0]] == [4 * 576, 4 * 128]


def test_far_contexts_are_planned():
    topology = Topology(tp=8, pcp=32, dcp=256, interleave=64)
    batch = Batch.from_lens([16_000_000, (1 << 31) + 5], [8192, 4096])
    plan = plan_step(
        batch, topology, V32, Budget(6_553_600, max_num_batched_tokens=1 << 14), rank=[0, 255], merge="a2a"
    )
    spans = [c for c in plan.ranks[0].chunks[1] if c.row_start > 0]
    assert plan.shards[1].num_keys.tolist() == [16_000_000, (1 << 31) + 5]
    assert max(c.key_stop for c in spans) >= (1 << 31) + 5
    assert all(c.num_keys <= 6_553_600 and c.peak_logits <= 128 << 20 for c in plan.ranks[0].chunks[1])
    assert same(plan.ranks[0].chunks, plan.ranks[1].chunks)


def test_several_ranks_in_the_order_asked():
    plan = plan_step(Batch.from_lens([9], [9]), Topology(dp=2, pcp=2), V32, Budget(100), rank=[np.int64(3), 0])
    assert [(p.rank, p.pcp_rank) for p in plan.ranks] == [(3, 1), (0, 0)]
    with pytest.raises(PlanError, match=r"rank 1 is not in this plan, which holds \[3, 0\]"):
        plan.rank(1)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"rank": 4}, ConfigError, r"rank 4 is not in this world of 4 ranks", id="rank-above"),
        pytest.param({"rank": -1}, ConfigError, "rank -1 is not in this world", id="rank-below"),
        pytest.param({"rank": []}, PlanError, "no ranks to plan: name at least one, or None for all", id="no-ranks"),
        pytest.param({"partition": "zigzag"}, ConfigError, "partition 'zigzag': use one of head_tail", id="partition"),
        pytest.param({"merge": "ring"}, ConfigError, "merge 'ring': use one of ag_rs, a2a", id="merge"),
        pytest.param(
            {"shard_decode_requests": True}, ConfigError, "leave the option out or use dcp=1", id="sharded-decodes"
        ),
        pytest.param(
            {"budget": Budget(100, max_num_batched_tokens=9)},
            PlanError,
            "10 query tokens, but max_num_batched_tokens=9: split the step or raise",
            id="tokens",
        ),
        pytest.param(
            {"budget": Budget(100, max_num_seqs=1)}, PlanError, "2 requests, but max_num_seqs=1: split", id="reqs"
        ),
        pytest.param({"budget": Budget(1)}, PlanError, "no key span fits: .*raise the workspace", id="workspace"),
        pytest.param({"model": load_model("deepseek-v4-flash")}, ConfigError, "block_size 128 or 256", id="block"),
    ],
)
def test_what_cannot_be_planned(change, error, words):
    batch = Batch.from_lens([9, 9], [1, 9])
    args = {"topology": Topology(tp=2, pcp=2, dcp=2), "model": V32, "budget": Budget(100)} | change
    with pytest.raises(error, match=words):
        plan_step(batch, **args)


@pytest.mark.parametrize(
    ("seq_len", "pools"), [(16, 1), (17, 2), (256, 16), (257, 17), pytest.param(15, 1, id="less-than-a-pool")]
)
def test_latents_behind_the_last_whole_pool_are_gathered(seq_len, pools):
    """GLM-5.3-Flash attends the incomplete pool's tokens too, so the gather has room for every token of a prompt."""
    model = load_model("glm-5.3-flash")
    topology = Topology(tp=1, pcp=2, dcp=2, interleave=16)
    plan = plan_step(
        Batch.from_lens([seq_len], [seq_len]), topology, model, default_budget(model), partition="contiguous"
    )
    (gather,) = plan.ranks[0].gathers[16]
    assert gather.num_keys * 16 >= seq_len
    assert gather.keys_per_rank == -(-pools // 2)


def test_block_tables_reach_every_token():
    lens = {"seq_lens": [9, 20], "query_lens": [1, 4], "prompt_lens": [8, 20]}
    topology = Topology(tp=2, dcp=2, block_size=4)
    budget = default_budget(V32)
    plan_step(Batch.from_lens(**lens, block_tables=[[3, 4], [5, 6, 7]]), topology, V32, budget)
    with pytest.raises(PlanError, match=r"request 1: seq_len 20 needs 3 blocks of 8 tokens .* has 2 columns"):
        plan_step(Batch.from_lens(**lens, block_tables=[[3, 4], [5, 6]]), topology, V32, budget)
    with pytest.raises(PlanError, match=r"request 0: block 1 of its block table is 0, the null block"):
        plan_step(Batch.from_lens(**lens, block_tables=[[3, 0], [5, 6, 7]]), topology, V32, budget)


def test_block_tables_of_requests_without_context_may_be_empty():
    plan_step(Batch.from_lens([0], [0], block_tables=[[]]), Topology(), V32, default_budget(V32))
