"""Plans of any world keep every promise, whichever way they are cut."""

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpkit.promises
from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.promises import check_step
from cpkit.promises.chunks import first_rank_keys
from cpkit.step import plan_step
from cpkit.topology import Topology
from cpkit.views.balance import plan_balance
from tests import oracles
from tests.promises import worlds


@settings(max_examples=100)
@given(data=st.data())
def test_right_plans_break_nothing(data):
    name = data.draw(st.sampled_from(sorted(worlds.MODELS)))
    topology = data.draw(worlds.topologies(name))
    batch = worlds.make_batch(
        data.draw(st.lists(worlds.requests(), min_size=1, max_size=5)), topology, tables=data.draw(st.booleans())
    )
    options = {
        "partition": data.draw(st.sampled_from(worlds.PARTITIONS)),
        "merge": data.draw(st.sampled_from(["ag_rs", "a2a"])),
        "shard_decode_requests": data.draw(st.sampled_from([None, False] if topology.dcp > 1 else [None, False, True])),
    }
    plans = worlds.plan_ranks(batch, topology, worlds.MODELS[name], data.draw(worlds.budgets(topology)), **options)
    assert check_step(plans) == ()
    assert len({tuple(plan.digests().items()) for plan in plans}) == 1


@pytest.mark.parametrize("rank", [None, 0], ids=["all-ranks-in-one-plan", "one-rank-world"])
def test_plans_may_hold_several_ranks(rank):
    topology = Topology(pcp=2, tp=2, dcp=4) if rank is None else Topology()
    model = worlds.MODELS["deepseek-v3.2"]
    batch = worlds.make_batch([(50, 1, 50), (0, 40, 40)], topology)
    assert check_step([plan_step(batch, topology, model, default_budget(model), rank=rank)]) == ()


@pytest.mark.parametrize("replica", [0, 1, 3])
def test_any_replica_of_the_world_is_checked(replica):
    topology = Topology(dp=2, pp=2, pcp=2, tp=2, dcp=4)
    model = worlds.MODELS["deepseek-v3.2"]
    batch = worlds.make_batch([(50, 1, 50), (0, 40, 40)], topology)
    ranks = range(4 * replica, 4 * replica + 4)
    assert check_step([plan_step(batch, topology, model, default_budget(model), rank=rank) for rank in ranks]) == ()


def test_a_step_without_requests_breaks_nothing():
    topology, model = Topology(pcp=2, dcp=2), worlds.MODELS["deepseek-v3.2"]
    assert check_step(worlds.plan_ranks(Batch.from_lens([], []), topology, model, default_budget(model))) == ()


@pytest.mark.parametrize(("dcp_size", "turn"), [(1, 1), (2, 1), (2, 2), (3, 5), (16, 64)])
def test_the_first_rank_gets_the_most_keys(dcp_size, turn):
    most = [len(max(oracles.deal(n, dcp_size, turn), key=len)) for n in range(200)]
    assert first_rank_keys(np.arange(200), dcp_size, turn).tolist() == most


def test_the_checker_imports_nothing_of_the_planner():
    names = []
    for path in Path(cpkit.promises.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names += [f"{node.module}.{alias.name}" for alias in node.names]
    assert any(name.startswith("cpkit.step") for name in names)
    assert not [name for name in names if name.startswith("cpkit.planner")]


def count_balance(requests, topology, placed):
    """Tokens and work of each PCP rank, keys of each DCP rank. placed: of each request, each PCP rank's positions."""
    work = [0] * topology.pcp
    tokens = [0] * topology.pcp
    held = [0] * topology.dcp
    for request, (computed, query, _) in enumerate(requests):
        for pcp_rank, positions in enumerate(placed[request]):
            tokens[pcp_rank] += len(positions)
            work[pcp_rank] += sum(len(range(pos + 1)) for pos in positions)
        for dcp_rank, keys in enumerate(oracles.deal(computed + query, topology.dcp, topology.interleave)):
            held[dcp_rank] += len(keys)
    return tokens, work, held


def test_balance_counts_each_rank():
    """pcp=2, tp=2, dcp=4, in the order 0, 2, 1, 3: a replicated decode, and a prefill of 8 cut head to tail."""
    topology, model = Topology(pcp=2, tp=2, dcp=4), worlds.MODELS["deepseek-v3.2"]
    requests = [(9, 1, 9), (3, 8, 11)]
    placed = [[[9], [9]], [[3, 4, 9, 10], [5, 6, 7, 8]]]
    balance = plan_balance(
        worlds.plan_ranks(worlds.make_batch(requests, topology), topology, model, default_budget(model))
    )
    tokens, work, held = count_balance(requests, topology, placed)
    layers = sum(layer.num_layers for layer in model.layers)
    assert balance.ranks.tolist() == [0, 1, 2, 3]
    assert balance.tokens.tolist() == [tokens[0], tokens[0], tokens[1], tokens[1]]
    assert balance.causal_work.tolist() == [layers * work[i] for i in (0, 0, 1, 1)]
    assert balance.stored_keys.tolist() == [held[0], held[2], held[1], held[3]]


def test_balance_is_the_same_from_one_plan_or_many():
    topology, model = Topology(pcp=4, tp=2, dcp=8, interleave=128, block_size=256), worlds.MODELS["deepseek-v4-flash"]
    batch = worlds.make_batch([(300, 1, 300), (0, 777, 777), (0, 5, 5)], topology)
    one = plan_balance([plan_step(batch, topology, model, default_budget(model))])
    many = plan_balance(worlds.plan_ranks(batch, topology, model, default_budget(model))[::-1])
    for name in ("ranks", "tokens", "causal_work", "stored_keys"):
        assert getattr(one, name).tolist() == getattr(many, name).tolist()
