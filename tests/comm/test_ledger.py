"""Collectives counted as they are issued, and compared with the plan's list."""

import pytest
import torch

from cpkit.batch import Batch
from cpkit.budget import Budget
from cpkit.comm.faulty import FaultyComm
from cpkit.comm.ledger import Issued, compare
from cpkit.comm.simulated import run_ranks
from cpkit.model import load_model
from cpkit.planner.collectives import Collective
from cpkit.step import plan_step
from cpkit.topology import Topology

PLAN = (
    Collective("all_gather", "dcp", "lse", "float32", 8, times=2),
    Collective("reduce_scatter", "dcp", "outputs", "float32", 64),
)
ISSUED = (
    Issued("all_gather", "dcp", "lse", "float32", 8, 32, "worker.py:1"),
    Issued("all_gather", "dcp", "lse", "float32", 8, 32, "worker.py:1"),
    Issued("reduce_scatter", "dcp", "outputs", "float32", 64, 256, "worker.py:2"),
)


def test_the_planned_list_has_no_difference():
    assert compare(ISSUED, PLAN) is None
    assert compare((), ()) is None


LSE = "all_gather of lse over dcp, 8 float32"
OUTPUTS = "reduce_scatter of outputs over dcp, 64 float32"


@pytest.mark.parametrize(
    ("issued", "says"),
    [
        pytest.param(ISSUED[1:], f"1: the plan has {LSE}, issued was {OUTPUTS} at worker.py:2", id="one-of-two"),
        pytest.param(ISSUED[:2], f"2: the plan has {OUTPUTS}, nothing more was issued", id="last-missing"),
        pytest.param((*ISSUED, ISSUED[0]), f"3: the plan has ended, issued was {LSE} at worker.py:1", id="one-more"),
        pytest.param(ISSUED[::-1], f"0: the plan has {LSE}, issued was {OUTPUTS} at worker.py:2", id="other-order"),
    ],
)
def test_the_first_difference_is_told(issued, says):
    assert str(compare(issued, PLAN)) == f"collective {says}"


@pytest.mark.parametrize(
    ("field", "value"),
    [("op", "all_to_all"), ("group", "tp"), ("what", "outputs"), ("dtype", "int32"), ("elements", 7)],
)
def test_every_field_counts(field, value):
    words = {name: getattr(ISSUED[1], name) for name in Issued.__slots__}
    difference = compare((ISSUED[0], Issued(**(words | {field: value})), ISSUED[2]), PLAN)
    assert difference.index == 1 and difference.planned is PLAN[0]


def test_a_comm_counts_what_can_move_data():
    def program(comm):
        comm.all_gather(torch.zeros(3, 2, dtype=torch.bfloat16), "dcp", what="a")
        comm.all_gather(torch.zeros(3, 2), "pcp", what="local")  # one rank
        comm.all_gather(torch.zeros(0, 2), "dcp", what="empty")
        comm.barrier("dcp")
        comm.reduce_scatter(torch.zeros(4, dtype=torch.int64), "tp", what="b")
        first = comm.ledger.take()
        comm.all_gather(torch.zeros(5, dtype=torch.bfloat16), "dcp", what="a")
        return first, comm.ledger.take(), comm.ledger.take()

    for first, second, third in run_ranks(Topology(tp=2, dcp=2), program):
        assert [(one.op, one.group, one.what, one.dtype, one.elements, one.bytes) for one in first] == [
            ("all_gather", "dcp", "a", "bfloat16", 6, 12),
            ("reduce_scatter", "tp", "b", "int64", 4, 32),
        ]
        assert [one.elements for one in second] == [5] and third == ()
        assert all("comm/test_ledger.py:" in one.site for one in (*first, *second))


@pytest.mark.parametrize("num_bytes", [0, 12])
def test_a_collective_carried_out_by_other_means_counts_as_one(num_bytes):
    def program(comm):
        comm.all_gather(torch.zeros(num_bytes, dtype=torch.uint8), "dcp", what="a")
        entered = comm.ledger.take()
        call = comm.announce("all_gather", "dcp", "a", torch.uint8, (num_bytes,))
        return entered, comm.ledger.take(), call

    for entered, announced, call in run_ranks(Topology(tp=2, dcp=2), program):
        assert len(entered) == (num_bytes > 0)
        assert compare(announced, [Collective(one.op, one.group, one.what, one.dtype, 12) for one in entered]) is None
        assert [one.bytes for one in announced] == [one.bytes for one in entered]
        assert call.number == 2 and "comm/test_ledger.py:" in call.site


def test_a_faulty_comm_leaves_out_one_collective_and_no_other():
    def program(comm):
        faulty = FaultyComm(comm)
        faulty.fault = "skipped-collective"
        alone = faulty.all_gather(torch.full((1,), comm.rank), "dcp", what="a")
        faulty.barrier("dcp")
        both = faulty.all_gather(torch.full((1,), comm.rank), "dcp", what="b")
        rounded = FaultyComm(comm)
        rounded.fault = "wrong-dtype"
        third = rounded.all_reduce(torch.tensor([1 / 3]), "dcp", what="c")
        return alone.tolist(), both.tolist(), third.tolist(), comm.ledger.take()

    third = float(torch.tensor(1 / 3).to(torch.bfloat16))
    for rank, (alone, both, total, issued) in enumerate(run_ranks(Topology(tp=2, dcp=2), program)):
        assert alone == [rank, rank] and both == [0, 1]
        assert total == [float(torch.tensor(2 * third).to(torch.bfloat16))]
        assert [(one.what, one.dtype) for one in issued] == [("b", "int64"), ("c", "bfloat16")]


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
def test_a_plan_carried_out_as_listed_agrees(merge):
    """Ranks that issue a planned step's list, with tensors of the planned sizes, have the plan's ledger and bytes."""
    topology = Topology(tp=2, pcp=2, dcp=4)
    batch = Batch.from_lens([301, 640], [1, 512], [300, 640])
    plan = plan_step(batch, topology, load_model("deepseek-v3.2"), Budget(workspace_tokens=400), merge=merge)
    planned = [*plan.collectives.layers[0], *plan.collectives.step]

    def program(comm):
        for one in planned:
            for _ in range(one.times):
                tensor = torch.zeros(one.elements, dtype=getattr(torch, one.dtype))
                getattr(comm, one.op)(tensor, one.group, what=one.what)
        return comm.ledger.take()

    assert len(planned) > 8
    for issued in run_ranks(topology, program):
        assert compare(issued, planned) is None
        assert sum(one.bytes for one in issued) == sum(one.bytes for one in planned)
        assert compare(issued[1:], planned).index == 0
