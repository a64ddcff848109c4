"""The steps of a run: what they compute, where it goes, and which tokens are equal."""

import numpy as np
import pytest

from cpkit.batch import Batch
from cpkit.errors import InputError
from cpkit.run.steps import batch_steps, named_by_request, prompt_steps, trace_steps
from cpkit.workload.request import Request, Trace
from tests.worker.worlds import Case

SETTINGS = Case("dsa", 1, {"tp": 2, "dcp": 2}, budget={"max_num_batched_tokens": 16}).settings
BLOCK = SETTINGS.topology.virtual_block  # 128 tokens


def computed(steps):
    """Positions that each request computes, over all steps, in order."""
    found = {}
    for batch in steps.batches:
        for req, seq, query in zip(batch.req_ids.tolist(), batch.seq_lens, batch.query_lens, strict=True):
            found.setdefault(req, []).extend(range(int(seq - query), int(seq)))
    return found


@pytest.mark.parametrize("num_decodes", [0, 1, 4])
def test_prompts_are_prefilled_within_the_budget_and_then_decoded(num_decodes):
    steps = prompt_steps([40, 1, 16], num_decodes, SETTINGS, seed=0)
    assert computed(steps) == {i: list(range(n + num_decodes)) for i, n in enumerate([40, 1, 16])}
    assert max(batch.num_tokens for batch in steps.batches) <= 16
    assert not steps.has_history
    blocks = [set(row[row > 0].tolist()) for row in steps.batches[-1].block_tables]
    assert all(max(row) < steps.pool.num_blocks for row in blocks if row)


@pytest.mark.parametrize(("lens", "num_decodes"), [([], 1), ([0], 1), ([3], -1)], ids=["none", "empty", "negative"])
def test_prompts_are_refused(lens, num_decodes):
    with pytest.raises(InputError, match="at least one prompt of at least one token"):
        prompt_steps(lens, num_decodes, SETTINGS, seed=0)


def test_batch_without_tables_gets_blocks_of_its_own():
    batch = Batch.from_lens([BLOCK + 1, 0, BLOCK], [1, 0, 5], [BLOCK, 0, BLOCK])
    steps = batch_steps(batch, SETTINGS, "x")
    assert steps.batches[0].block_tables.tolist() == [[1, 2], [3, 0], [4, 0]]
    assert (steps.pool.num_blocks, steps.pool.max_blocks, steps.has_history) == (5, 2, True)


def test_tokens_of_one_block_are_equal_and_others_are_not():
    batch = Batch.from_lens([BLOCK + 5, BLOCK + 5], [5, 5], block_tables=[[7, 1], [7, 2]])
    steps = batch_steps(batch, SETTINGS, "x")
    names = [steps.content.names(np.full(BLOCK + 5, req), np.arange(BLOCK + 5)) for req in (0, 1)]
    assert (names[0][:BLOCK] == names[1][:BLOCK]).all() and (names[0][BLOCK:] != names[1][BLOCK:]).all()
    with pytest.raises(InputError, match=r"requests share blocks \[7\]"):
        named_by_request(steps)


def test_trace_names_shared_prompt_blocks_alone():
    hashes = [np.array([1, 2], np.int32), np.array([1, 3], np.int32)]
    requests = tuple(Request(i, 0.0, 2 * BLOCK, 1, h, hash_block_size=BLOCK) for i, h in enumerate(hashes))
    steps = trace_steps(Trace("x", "test", requests), SETTINGS, num_blocks=None, max_steps=40, seed=0)
    names = [steps.content.names(np.full(2 * BLOCK, req), np.arange(2 * BLOCK)) for req in (0, 1)]
    equal = names[0] == names[1]
    assert equal[:BLOCK].all() and not equal[BLOCK:].any()
    assert steps.content.names(np.array([0, 1]), np.array([2 * BLOCK] * 2)).tolist() == [0, 1]


def test_nothing_to_run_is_refused():
    with pytest.raises(InputError, match="a batch without requests runs nothing"):
        batch_steps(Batch.from_lens([], []), SETTINGS, "empty.json")
    large = Trace("x", "test", (Request(0, 0.0, 100 * BLOCK, 1),))
    with pytest.raises(InputError, match="no step to run: every request was refused"):
        trace_steps(large, SETTINGS, num_blocks=2, max_steps=3, seed=0)


def test_longest_request_is_the_one_asked_for():
    assert prompt_steps([11], 4, SETTINGS, 0, max_model_len=16).batches[-1].seq_lens.tolist() == [15]
    with pytest.raises(InputError, match="11 tokens and the 5 behind it are 16, above --max-model-len 15"):
        prompt_steps([11], 4, SETTINGS, 0, max_model_len=15)
    trace = Trace("x", "test", (Request(0, 0.0, 30, 1), Request(1, 0.0, 3, 1)))
    steps = trace_steps(trace, SETTINGS, num_blocks=None, max_steps=None, seed=0, max_model_len=30)
    assert computed(steps) == {1: [0, 1, 2]}
