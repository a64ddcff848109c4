"""One fault per rule, planted in otherwise right plans: each is reported by its rule, with the ranks that have it.

World "gather": pcp=2, tp=2, dcp=4, in the order 0, 2, 1, 3. "sharded": pcp=4, decodes dealt out. "dcp": tp=4, dcp=4.
"spans", "dcp-spans": a request cut along its keys and queries. "idle": ranks without a token.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cpkit.budget import default_budget
from cpkit.errors import PlanError
from cpkit.planner.chunks import Chunk
from cpkit.promises import check_step, keys, queries
from cpkit.promises.violation import RULES
from cpkit.step import plan_step
from cpkit.topology import Topology
from tests.promises import worlds
from tests.promises.plant import (
    cut_inside_a_round,
    everywhere,
    in_batch,
    in_chunk,
    in_first_layer,
    in_gather,
    in_rank,
    in_rows,
    in_shards,
    limits,
    on,
    one_collective,
    put,
    same_number_twice,
    share_block,
    shift,
    shorten,
    swap_rows,
    two_empty_rows,
)

MODEL = worlds.MODELS["deepseek-v3.2"]
BUDGET = default_budget(MODEL)

# (computed, query_len, prompt_len): two decodes, a prefill, a resumed prefill, one too short to split
REQUESTS = [(70, 1, 70), (9, 1, 4), (0, 90, 90), (130, 33, 200), (5, 3, 20)]

WORLDS = {
    "gather": (Topology(pcp=2, tp=2, dcp=4, block_size=8), REQUESTS, BUDGET),
    "sharded": (Topology(pcp=4, block_size=8), REQUESTS, BUDGET),
    "dcp": (Topology(tp=4, dcp=4, block_size=8), REQUESTS, BUDGET),
    "spans": (
        Topology(pcp=2, dcp=2, block_size=8),
        [(0, 64, 64)],
        replace(BUDGET, workspace_tokens=24, logits_bytes=4 * 96),
    ),
    "dcp-spans": (
        Topology(tp=2, dcp=2, block_size=8),
        [(0, 64, 64)],
        replace(BUDGET, workspace_tokens=24, logits_bytes=4 * 96),
    ),
    "idle": (Topology(pcp=4, block_size=8), [(0, 1, 1)], BUDGET),
}


@cache
def right_plans(world):
    topology, requests, budget = WORLDS[world]
    plans = tuple(worlds.plan_ranks(worlds.make_batch(requests, topology), topology, MODEL, budget))
    assert check_step(plans) == ()
    return plans


AGREE = {
    "seq_lens": in_batch(lambda b: {"seq_lens": put(b.seq_lens, 0, 72)}),
    "query_lens": in_batch(lambda b: {"query_lens": put(b.query_lens, 2, 89)}),
    "prompt_lens": in_batch(lambda b: {"prompt_lens": put(b.prompt_lens, 3, 201)}),
    "req_ids": in_batch(lambda b: {"req_ids": put(b.req_ids, 3, 77)}),
    "block_tables": in_batch(lambda b: {"block_tables": put(b.block_tables, (1, 0), 999)}),
    "topology": lambda plan: replace(plan, topology=replace(plan.topology, interleave=2)),
    "model": lambda plan: replace(plan, model=worlds.MODELS["deepseek-v4-flash"]),
    "budget": lambda plan: replace(plan, budget=replace(plan.budget, num_speculative_tokens=1)),
    "merge": lambda plan: replace(plan, merge="a2a"),
    "partition": lambda plan: replace(plan, partition=replace(plan.partition, strategy="contiguous")),
    "padded": lambda plan: replace(plan, padded=plan.padded + 1),
    "shards": in_shards(lambda s: {"shard_keys": put(s.shard_keys, 0, 99)}),
    "collectives": one_collective(elements=1),
    "chunks": in_chunk(0, lambda c: {"num_queries": c.num_queries + 1, "run": c.run + 1}),
    "gathers": in_gather(0, lambda g: {"shard_keys": put(g.shard_keys, 1, int(g.shard_keys[1]) + 1)}),
}


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("field", AGREE)
def test_a_rank_that_disagrees_is_named(field, rank):
    found = check_step(on(rank, AGREE[field])(right_plans("gather")))
    assert [v.ranks for v in found if (v.promise, v.rule) == ("agree", field)] == [(rank,)]


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        pytest.param(one_collective(op="all_to_all"), "layers[0][1].op is 'all_to_all'", id="operation"),
        pytest.param(one_collective(group="tp"), "layers[0][1].group is 'tp'", id="group"),
        pytest.param(one_collective(dtype="float32"), "layers[0][1].dtype is 'float32'", id="dtype"),
        pytest.param(one_collective(elements=3), "layers[0][1].elements is 3", id="elements"),
        pytest.param(one_collective(times=2), "layers[0][1].times is 2", id="times"),
        pytest.param(in_first_layer(lambda ops: [ops[1], ops[0], *ops[2:]]), "layers[0][0].", id="order"),
        pytest.param(in_first_layer(lambda ops: ops[:-1]), "only one has", id="one-missing"),
    ],
)
def test_the_first_collective_that_differs_is_named(plant, words):
    found = check_step(on(3, plant)(right_plans("gather")))
    (violation,) = (v for v in found if v.rule == "collectives")
    assert violation.ranks == (3,)
    assert words in violation.detail


def test_different_inputs_are_all_that_is_reported():
    found = check_step(on(1, AGREE["seq_lens"])(right_plans("gather")))
    assert [(v.rule, v.ranks) for v in found] == [("seq_lens", (1,))]
    assert "seq_lens[0] is 72, on most ranks 71" in found[0].detail


class GappyChunk(Chunk):
    """Its runs leave out the second query token."""

    def runs(self):
        yield 0, 1
        yield 2, self.num_queries


def gappy(plan):
    chunks = tuple(GappyChunk(*(getattr(c, n) for n in Chunk.__dataclass_fields__)) for c in plan.ranks[0].chunks[1])
    return in_rank(chunks={1: chunks})(plan)


FAULTS = [
    # world, promise/rule, ranks that are named, fault
    ("gather", "bounded/tokens", (0, 1, 2, 3), limits(max_num_batched_tokens=127)),
    ("gather", "bounded/requests", (0, 1, 2, 3), limits(max_num_seqs=4)),
    ("gather", "bounded/workspace", (0, 1, 2, 3), limits(workspace_tokens=99)),
    ("sharded", "bounded/workspace", (1,), on(1, in_chunk(0, lambda c: {"num_keys": BUDGET.workspace_tokens + 1}))),
    ("spans", "bounded/logits", (0, 1), limits(logits_bytes=4 * 95)),
    ("spans", "bounded/logits", (1,), on(1, in_chunk(1, lambda c: {"run": c.run + 1}))),
    ("gather", "cover/place", (2,), on(2, in_rank(dcp_rank=0))),
    ("gather", "cover/place", (2,), on(2, in_rank(pcp_rank=0))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"req": r.req[:-1]}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"req": put(r.req, -1, 5)}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"stride": put(r.stride, 0, 0)}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"num_decodes": 1}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"num_decodes": 3}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"num_decodes": 99}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"query_start_loc": put(r.query_start_loc, 1, 2)}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"query_start_loc": r.query_start_loc + 1}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"seq_lens": put(r.seq_lens, 2, 7)}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: {"is_prefilling": ~r.is_prefilling}))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: swap_rows(r, 0)))),
    ("gather", "cover/rows", (2,), on(2, in_rows(lambda r: swap_rows(r, 2)))),
    ("dcp", "cover/rows", (2,), on(2, in_rows(lambda r: shift(r, 1)))),
    ("dcp", "cover/rows", (2,), on(2, in_rows(lambda r: shift(r, 1, by=-1)))),
    ("idle", "cover/rows", (3,), on(3, in_rows(two_empty_rows))),
    ("gather", "cover/query_tokens", (0, 2), on(2, in_rows(lambda r: shift(r, 2)))),
    ("gather", "cover/query_tokens", (1, 3), on(3, in_rows(lambda r: shorten(r, 2)))),
    ("sharded", "cover/query_tokens", (0, 1, 2, 3), on(3, in_rows(lambda r: shorten(r, 1)))),
    ("gather", "cover/layout", (2,), on(2, in_rows(lambda r: shift(r, 2)))),
    ("gather", "cover/layout", (0, 1, 2, 3), everywhere(lambda p: replace(p, padded=p.padded - 1))),
    (
        "gather",
        "cover/layout",
        (0, 1, 2, 3),
        everywhere(lambda p: replace(p, partition=replace(p.partition, piece_start=p.partition.piece_start + 1))),
    ),
    ("gather", "cover/stored_keys", (1, 2), on(2, in_rank(dcp_rank=2))),
    ("gather", "cover/stored_keys", (0, 1, 2, 3), on(2, in_shards(lambda s: {"interleave": 2}))),
    ("gather", "cover/stored_keys", (2,), on(2, in_shards(lambda s: {"num_keys": s.num_keys + 4}))),
    ("gather", "cover/stored_keys", (2,), on(2, in_shards(lambda s: {"num_keys": s.num_keys - 100}))),
    ("gather", "cover/stored_keys", (2,), on(2, lambda p: replace(p, shards={}))),
    (
        "gather",
        "cover/stored_keys",
        (0, 1, 2, 3),
        everywhere(in_shards(lambda s: {"num_keys": put(s.num_keys, 2, 89)})),
    ),
    ("sharded", "cover/stored_keys", (1,), on(1, in_shards(lambda s: {"num_keys": put(s.num_keys, 2, 89)}))),
    ("gather", "cover/slots", (0,), everywhere(in_batch(lambda b: {"block_tables": put(b.block_tables, (2, 1), 0)}))),
    ("gather", "cover/slots", (0,), everywhere(in_batch(lambda b: {"block_tables": b.block_tables[:, :2]}))),
    ("gather", "cover/slots", (1,), everywhere(in_batch(share_block))),
    ("gather", "cover/spans", (0, 1, 2, 3), everywhere(in_rank(chunks={}))),
    ("gather", "cover/spans", (0, 1, 2, 3), everywhere(in_rank(chunks={1: ()}))),
    ("gather", "cover/spans", (0, 1, 2, 3), everywhere(in_chunk(0, lambda c: {"row_start": 2}))),
    ("gather", "cover/spans", (0, 1, 2, 3), everywhere(in_chunk(0, lambda c: {"row_stop": c.row_stop + 1}))),
    ("gather", "cover/spans", (0, 1, 2, 3), everywhere(in_chunk(0, lambda c: {"row_stop": c.row_start}))),
    ("gather", "cover/spans", (0, 1, 2, 3), everywhere(in_chunk(0, lambda c: {"key_stop": 100}))),
    ("sharded", "cover/spans", (1,), on(1, in_chunk(0, lambda c: {"key_start": 1}))),
    ("spans", "cover/spans", (0, 1), everywhere(in_chunk(1, lambda c: {"key_start": c.key_start + 2}))),
    ("spans", "cover/spans", (0, 1), everywhere(in_chunk(1, lambda c: {"key_start": c.key_start - 2}))),
    ("spans", "cover/spans", (0, 1), everywhere(in_chunk(0, lambda c: {"key_stop": c.key_stop - 2}))),
    ("dcp-spans", "cover/spans", (0, 1), everywhere(cut_inside_a_round)),
    ("spans", "cover/last_span", (0, 1), everywhere(in_chunk(0, lambda c: {"last_span": True}))),
    ("spans", "cover/last_span", (0, 1), everywhere(in_chunk(-1, lambda c: {"last_span": False}))),
    ("spans", "cover/runs", (0, 1), everywhere(in_chunk(0, lambda c: {"run": 0}))),
    ("spans", "cover/runs", (0, 1), everywhere(gappy)),
    ("spans", "cover/runs", (0, 1), everywhere(in_chunk(0, lambda c: {"num_queries": c.num_queries - 1}))),
    ("sharded", "cover/runs", (2,), on(2, in_chunk(0, lambda c: {"num_queries": c.num_queries + 1}))),
    ("sharded", "cover/chunk_keys", (2,), on(2, in_chunk(0, lambda c: {"num_keys": c.num_keys - 1}))),
    ("dcp", "cover/chunk_keys", (0, 1, 2, 3), everywhere(in_chunk(0, lambda c: {"num_keys": c.num_keys + 1}))),
    ("gather", "cover/gathers", (0, 1, 2, 3), everywhere(in_rank(gathers={1: ()}))),
    (
        "gather",
        "cover/gathers",
        (0, 1, 2, 3),
        everywhere(in_gather(0, lambda g: {"shard_keys": put(g.shard_keys, 1, 40)})),
    ),
    (
        "gather",
        "cover/gathers",
        (0, 1, 2, 3),
        everywhere(in_gather(0, lambda g: {"shard_keys": put(g.shard_keys, 1, 42)})),
    ),
    ("gather", "cover/gathers", (0, 1, 2, 3), everywhere(in_gather(0, lambda g: {"shard_keys": g.shard_keys[:-1]}))),
    ("gather", "cover/gathers", (0, 1, 2, 3), everywhere(in_gather(0, same_number_twice))),
    ("gather", "cover/gathers", (0, 1, 2, 3), everywhere(in_gather(0, lambda g: {"interleave": 2}))),
    ("gather", "cover/gathers", (0, 1, 2, 3), everywhere(in_gather(0, lambda g: {"dcp_size": 2}))),
    ("spans", "cover/gathers", (0, 1), everywhere(in_gather(1, lambda g: {"first_local": g.first_local + 1}))),
    ("sharded", "cover/gathers", (2,), on(2, lambda p: in_rank(gathers=right_plans("gather")[2].ranks[0].gathers)(p))),
]


@pytest.mark.parametrize(
    ("world", "rule", "ranks", "plant"),
    [pytest.param(*f, id=f"{i}-{f[1].replace('/', '-')}") for i, f in enumerate(FAULTS)],
)
def test_a_planted_fault_is_reported(world, rule, ranks, plant):
    found = check_step(plant(right_plans(world)))
    named = {rank for v in found if f"{v.promise}/{v.rule}" == rule for rank in v.ranks}
    assert named == set(ranks), "\n".join(map(str, found))


def shifted(stored, by):
    return replace(stored, slot=stored.slot + by)


def in_turn_swapped(stored):
    """The first two keys of a block trade places."""
    slot = stored.slot.copy()
    at = int(np.flatnonzero((np.diff(slot) == 1) & (np.diff(stored.req) == 0))[0])
    slot[[at, at + 1]] = slot[[at + 1, at]]
    return replace(stored, slot=slot)


@pytest.mark.parametrize(
    ("rule", "module", "maker", "change"),
    [
        pytest.param("slots", keys, "stored_keys", lambda s: shifted(s, 8), id="another-block"),
        pytest.param("slots", keys, "stored_keys", lambda s: shifted(s, -int(s.slot[0])), id="null-block"),
        pytest.param(
            "slots", keys, "stored_keys", lambda s: replace(s, slot=s.slot // 8 * 8), id="one-slot-for-a-block"
        ),
        pytest.param("slots", keys, "stored_keys", in_turn_swapped, id="out-of-turn"),
        pytest.param("stored_keys", keys, "stored_keys", lambda s: replace(s, key=s.key - 1), id="key-of-before"),
        pytest.param(
            "restore", queries, "gather_layout", lambda g: replace(g, restore_idx=g.restore_idx[::-1]), id="reversed"
        ),
        pytest.param(
            "restore", queries, "gather_layout", lambda g: replace(g, restore_idx=g.restore_idx - 1), id="none"
        ),
        pytest.param(
            "restore", queries, "gather_layout", lambda g: replace(g, restore_idx=g.restore_idx[1:]), id="one-less"
        ),
        pytest.param(
            "kv_writer", queries, "gather_layout", lambda g: replace(g, writes_kv=~g.writes_kv), id="wrong-writers"
        ),
        pytest.param(
            "kv_writer", queries, "gather_layout", lambda g: replace(g, writes_kv=g.writes_kv | True), id="padding"
        ),
        pytest.param(
            "layout", queries, "gather_layout", lambda g: replace(g, gather_idx=g.gather_idx[::-1]), id="order"
        ),
    ],
)
def test_a_fault_in_index_arrays_is_reported(monkeypatch, rule, module, maker, change):
    plans = right_plans("gather")
    make = getattr(module, maker)
    monkeypatch.setattr(module, maker, lambda *arguments: change(make(*arguments)))
    assert rule in {v.rule for v in check_step(plans) if v.promise == "cover"}


def test_every_rule_is_planted():
    planted = {("agree", field) for field in AGREE} | {tuple(rule.split("/")) for _, rule, *_ in FAULTS}
    planted |= {("cover", "restore"), ("cover", "kv_writer")}  # in the index arrays
    assert planted == {(promise, rule) for promise, rules in RULES.items() for rule in rules}


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        pytest.param([], "no plans to check", id="none"),
        pytest.param([0, 1, 2], "no rank 3", id="one-missing"),
        pytest.param([0, 1, 2, 3, 3], "twice rank 3", id="one-twice"),
        pytest.param([0, 0, 1, 2], "no rank 3; twice rank 0", id="one-for-another"),
    ],
)
def test_plans_that_are_not_one_replica_are_refused(plans, words):
    with pytest.raises(PlanError, match=words):
        check_step([right_plans("gather")[rank] for rank in plans])


def test_ranks_of_two_replicas_are_refused():
    topology = Topology(dp=2, tp=2)
    batch = worlds.make_batch(REQUESTS, topology)
    plans = [plan_step(batch, topology, MODEL, BUDGET, rank=rank) for rank in (1, 2)]
    with pytest.raises(PlanError, match=r"no rank 0; beyond rank 2: .* 0\.\.1"):
        check_step(plans)


def test_a_violation_reads_as_a_sentence():
    (violation,) = check_step(on(1, AGREE["req_ids"])(right_plans("gather")))
    assert str(violation) == "agree/req_ids: rank 1: req_ids[3] is 77, on most ranks 3"
