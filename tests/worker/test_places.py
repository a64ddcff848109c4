"""A rank's place in a step: what travels, what is written where, and the window cache beside the sharded ones."""

import numpy as np
import pytest
import torch

from cpkit.activations.content import SHARED, Content
from cpkit.batch import Batch
from cpkit.errors import PlanError
from cpkit.worker.places import Places
from cpkit.worker.select import chunk_sets
from tests.worker.worlds import Case


def places_of(case, batch):
    settings = case.settings
    plan = settings.plan(batch)
    return [Places(plan, rank, torch.device("cpu")) for rank in plan.ranks]


@pytest.mark.parametrize("shard", [None, False], ids=["sharded", "replicated"])
def test_every_token_is_written_once_in_the_layout(shard):
    """A decode of 2 tokens and a prefill of 7, P = 2: all ranks know a replicated decode, rank 0 writes it."""
    case = Case("dsa", 1, {"pcp": 2}, shard=shard)
    batch = Batch.from_lens([12, 7], [2, 7], [10, 7], block_tables=[[3], [5]])
    ranks = places_of(case, batch)
    assert [one.num_known for one in ranks] == [2 * (shard is False)] * 2
    batches = [one.batch() for one in ranks]
    slots = batches[0].gathered.slot_mapping.tolist()
    assert slots == batches[1].gathered.slot_mapping.tolist()
    segments = [slots[: len(slots) // 2], slots[len(slots) // 2 :]]
    for one, batch, segment in zip(ranks, batches, segments, strict=True):
        assert batch.slot_mapping.tolist() == segment[: one.num_tokens]
        assert set(segment[one.num_tokens :]) <= {-1}
    written = sorted(slot for slot in slots if slot >= 0)
    assert written == [3 * 64 + 10, 3 * 64 + 11] + [5 * 64 + at for at in range(7)]
    assert sorted(slot for slot in ranks[0].window_writes().tolist() if slot >= 0) == written
    own = [slot for one in ranks for slot in one.window_batch().slot_mapping.tolist()]
    assert sorted(set(own)) == written and len(own) == 9 + 2 * (shard is False)


@pytest.mark.parametrize(
    ("dcp", "table", "window"),
    [(1, [3, 1, 0], [3, 1, 0]), (2, [3, 1, 0], [6, 7, 2, 3, 0, 0]), (4, [1], [4, 5, 6, 7])],
)
def test_window_blocks_of_a_block_id(dcp, table, window):
    case = Case("dsa", 1, {"tp": 4, "dcp": dcp})
    batch = Batch.from_lens([9], [9], block_tables=[table])
    assert places_of(case, batch)[0].window_tables.tolist() == [window]


def test_window_blocks_of_the_largest_block_id_do_not_wrap():
    last = 2**31 - 1
    batch = Batch.from_lens([9], [9], block_tables=[[last]])
    assert places_of(Case("dsa", 1, {"tp": 2, "dcp": 2}), batch)[0].window_tables.tolist() == [[2 * last, 2 * last + 1]]


def test_ranks_of_a_dcp_group_write_every_token_once():
    case = Case("dsa", 16, {"tp": 2, "dcp": 2})
    batch = Batch.from_lens([40], [40], block_tables=[[2]])
    slots = np.array([one.batch().slot_mapping.tolist() for one in places_of(case, batch)])
    assert ((slots >= 0).sum(0) == 1).all()
    assert (np.flatnonzero(slots[1] >= 0) == np.arange(16, 32)).all()


def test_steps_without_tables_or_requests_are_refused():
    case = Case("dsa", 1, {"pcp": 2})
    for batch in (Batch.from_lens([4], [4]), Batch.from_lens([], [], block_tables=np.zeros((0, 1), np.int32))):
        with pytest.raises(PlanError, match="runs on requests with block tables"):
            places_of(case, batch)


def test_names_of_tokens():
    content = Content(4, {5: np.array([8, 9]), 6: np.array([8]), 7: np.zeros(0, np.int64)})
    req_ids = np.repeat([5, 6, 7, 1 << 40], 3)
    names = content.names(req_ids, np.tile([0, 4, 8], 4))
    assert names.tolist() == [SHARED + 8, SHARED + 9, 5, SHARED + 8, 6, 6, 7, 7, 7, *[1 << 40] * 3]
    with pytest.raises(PlanError, match="request id -1"):
        content.names(np.array([-1]), np.array([0]))


def test_chunk_sets():
    """Two whole chunks, the second in two runs; then one request's three spans of two runs each."""

    class Chunk:
        def __init__(self, name, fills, last):
            self.name, self.fills_workspace, self.last_span = name, fills, last

    spec = "a+! b+! b-! c+ c- d+ d- e+! e-!"
    chunks = [Chunk(item[0], "+" in item, "!" in item) for item in spec.split()]
    found = [["".join(one.name for one in span) for span in spans] for spans in chunk_sets(chunks)]
    assert found == [["a"], ["bb"], ["cc", "dd", "ee"]]
    assert list(chunk_sets([])) == []
