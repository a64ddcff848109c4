"""agree: plans of all ranks, of one batch and of different ones, in memory and saved."""

from dataclasses import replace

import pytest

from cpkit.budget import Budget
from cpkit.consistency import agree
from cpkit.consistency.plans import DCP as DCP_FIELDS
from cpkit.consistency.plans import REPLICA as REPLICA_FIELDS
from cpkit.consistency.plans import WORLD as WORLD_FIELDS
from cpkit.errors import PlanError
from cpkit.step import plan_step
from cpkit.topology import Topology
from cpkit.views.saved_plan import load_plan, save_plan
from tests.promises.plant import in_chunk, in_gather, on, one_collective
from tests.promises.worlds import MODELS, make_batch

WORLD = Topology(tp=2, pcp=2, dcp=4)
REQUESTS = [(0, 130, 130), (700, 1, 700), (64, 65, 129)]
MODEL = MODELS["deepseek-v3.2"]
BUDGET = Budget(1 << 20, 1 << 28)


def plan(rank, requests=REQUESTS, *, topology=WORLD, budget=None, **options):
    batch = make_batch(requests, WORLD)
    return plan_step(batch, topology, MODEL, budget or BUDGET, rank=rank, **options)


def world(**odd):
    """Plans of four ranks; rank 2's is made with `odd`."""
    return [plan(rank, **(odd if rank == 2 else {})) for rank in range(4)]


def told(plans):
    return {(one.field, one.ranks): one.detail for one in agree(plans)}


def test_half_of_the_ranks_are_no_majority():
    stale = [plan(rank, requests=[(0, 130, 130), (699, 1, 699), (64, 65, 129)]) for rank in (2, 3)]
    assert told([plan(0), plan(1), *stale])["seq_lens", (2, 3)] == "seq_lens[0] is 700, on as many others 701"


def test_equal_plans_agree():
    assert agree(world()) == ()
    assert agree([plan(None)]) == ()


@pytest.mark.parametrize(
    ("odd", "field", "detail"),
    [
        pytest.param(
            {"requests": [(0, 130, 130), (699, 1, 699), (64, 65, 129)]},
            "seq_lens",
            "seq_lens[0] is 700, on most ranks 701",
            id="stale-seq-len",
        ),
        pytest.param({"requests": REQUESTS[:2]}, "seq_lens", "shape (2,), on most ranks", id="dropped-request"),
        pytest.param({"requests": [*REQUESTS, (5, 1, 5)]}, "query_lens", "shape (4,)", id="extra-request"),
        pytest.param({"requests": REQUESTS[::-1]}, "query_lens", "query_lens[1] is 65, on most", id="reordered"),
        pytest.param(
            {"topology": replace(WORLD, interleave=8)},
            "topology",
            "topology.interleave is 8, on most ranks 1",
            id="interleave",
        ),
        pytest.param({"partition": "contiguous"}, "partition", "'contiguous', on most ranks", id="partition"),
        pytest.param({"merge": "a2a"}, "merge", "merge is 'a2a', on most ranks 'ag_rs'", id="merge"),
        pytest.param(
            {"budget": Budget(1 << 19, 1 << 28)}, "budget", "budget.workspace_tokens is 524288, on", id="budget"
        ),
    ],
)
def test_a_rank_that_plans_another_step_is_named(odd, field, detail):
    found = told(world(**odd))
    assert detail in found[field, (2,)]
    assert all(ranks == (2,) for _, ranks in found)


@pytest.mark.parametrize(
    ("plant", "field", "detail"),
    [
        pytest.param(one_collective(elements=7), "collectives", ".elements is 7, on most ranks", id="collective-size"),
        pytest.param(in_chunk(0, lambda c: {"num_keys": 5}), "chunks", "['num_keys'] is 5, on most ranks", id="chunk"),
        pytest.param(
            in_gather(0, lambda g: {"shard_keys": g.shard_keys + 1}), "gathers", "['shard_keys'][0] is", id="gather"
        ),
    ],
)
def test_a_rank_that_derives_something_else_is_named(plant, field, detail):
    found = told(on(2, plant)(world()))
    assert list(found) == [(field, (2,))] and detail in found[field, (2,)]


def test_replicas_may_work_on_different_batches():
    topology = Topology(dp=2, tp=2)
    batches = [make_batch(requests, topology) for requests in (REQUESTS, REQUESTS[:1])]
    plans = [plan_step(batches[rank // 2], topology, MODEL, BUDGET, rank=rank) for rank in range(4)]
    assert agree(plans) == ()
    plans[3] = plan_step(batches[0], topology, MODEL, BUDGET, rank=3)
    assert {(one.field, one.group) for one in agree(plans)} >= {("seq_lens", (2, 3))}


def test_saved_plans_name_their_file(tmp_path):
    files = []
    for rank, one in enumerate(world(requests=[(0, 130, 130), (699, 1, 699), (64, 65, 129)])):
        files.append(str(tmp_path / f"{rank}.npz"))
        save_plan(one, files[-1])
    found = {one.field: one for one in agree([load_plan(file) for file in files], files)}
    assert found["seq_lens"].sources == (files[2],) and "[0] is 700" in found["seq_lens"].detail
    assert agree([load_plan(files[0]), plan(1), load_plan(files[3])]) == ()


def test_machines_that_planned_all_ranks_are_compared(tmp_path):
    right, wrong = plan(None), plan(None, REQUESTS[:2])
    found = agree([right, right, wrong], ["a", "b", "c"])
    assert {one.sources for one in found} == {("c",)} and found[0].ranks == (0, 1, 2, 3)


def test_no_plans():
    with pytest.raises(PlanError, match="no plans"):
        agree([])


def test_every_digest_is_compared():
    assert set(plan(0).digests()) == {*WORLD_FIELDS, *REPLICA_FIELDS, *DCP_FIELDS}
