"""Steps in sequence over persistent caches: key spans, prefixes that requests share, contexts written beforehand."""

from dataclasses import replace

import numpy as np
import pytest

from cpkit.activations.generate import Generated
from cpkit.batch import Batch
from cpkit.report.run_report import total_findings
from cpkit.run.execute import RunOptions, execute
from cpkit.run.steps import batch_steps, trace_steps
from cpkit.workload.request import Request, Trace
from tests.worker.worlds import Case, findings

ALONE, DCP, PCP, BOTH = {}, {"tp": 2, "dcp": 2}, {"pcp": 2}, {"tp": 2, "pcp": 2, "dcp": 4}
WORLDS = pytest.mark.parametrize("world", [ALONE, DCP, PCP, BOTH], ids=["alone", "dcp", "pcp", "pcp-dcp"])


def verified(steps, case):
    _, reports = execute(steps, case.settings, Generated(3), RunOptions(comm="sim", verify="all"))
    found = total_findings(reports)
    assert found.first is None, str(found.first)
    return found


@pytest.mark.parametrize(
    ("kind", "interleave", "budget"),
    [
        pytest.param("dsa", 1, {"workspace_tokens": 16, "logits_bytes": 4 * 60}, id="dsa"),
        pytest.param("dsa", 4, {"workspace_tokens": 40, "logits_bytes": 4 * 33}, id="dsa-logits-decide"),
        pytest.param("c4a", 4, {"workspace_tokens": 64, "logits_bytes": 4 * 70}, id="c4a"),
    ],
)
@WORLDS
def test_key_spans(kind, interleave, budget, world):
    """Contexts beyond the workspace: candidates are carried from span to span, outputs merged over spans."""
    case = Case(kind, interleave, world, prompts=(90, 3), decodes=1, budget=budget | {"max_num_batched_tokens": 40})
    steps, settings = case.steps, case.settings
    chunks = [
        chunk for batch in steps.batches for part in settings.plan(batch, 0).ranks[0].chunks.values() for chunk in part
    ]
    assert not all(chunk.last_span for chunk in chunks)
    assert any(chunk.num_runs > 1 for chunk in chunks)
    assert findings(case).rows


@WORLDS
def test_key_spans_of_all_states(world):
    """A layer that attends every state: two spans of states, one softmax."""
    budget = {"workspace_tokens": 512, "logits_bytes": 4 * 4 * 100, "max_num_batched_tokens": 300}
    case = Case("c128a", 128, world, prompts=(1100,), decodes=0, budget=budget)
    last = case.settings.plan(case.steps.batches[-1], 0).ranks[0].chunks[128]
    assert not last[0].last_span
    assert findings(case, verify="sample").rows


@pytest.mark.parametrize("kind", ["dsa", "swa"])
@pytest.mark.parametrize("world", [PCP, BOTH], ids=["pcp", "pcp-dcp"])
def test_as_many_prompts_as_a_step_holds(kind, world):
    """A rank has two rows of each prompt, and max_num_seqs counts prompts."""
    case = Case(kind, 16, world, prompts=(20, 9), decodes=1, budget={"max_num_seqs": 2})
    assert case.steps.batches[0].num_reqs == 2
    assert findings(case).rows


@pytest.mark.parametrize("kind", ["dsa", "c4a", "swa"])
@WORLDS
def test_prefix_hits_read_what_another_request_wrote(kind, world):
    case = Case(kind, 16, world)
    block = case.settings.topology.virtual_block
    shared = np.arange(4, dtype=np.int32)
    first = Request(0, 0.0, 2 * block + 5, 2, shared[:3], hash_block_size=block)
    second = Request(1, 0.0, 2 * block + 9, 3, shared[[0, 1, 3]], hash_block_size=block, depends_on=0)
    case = replace(case, budget={"max_num_batched_tokens": 4 * block})
    steps = trace_steps(
        Trace("two turns", "test", (first, second)), case.settings, num_blocks=8, max_steps=None, seed=0
    )
    start = next(batch for batch in steps.batches if 1 in batch.req_ids)
    assert int(start.num_computed[list(start.req_ids).index(1)]) == 2 * block
    assert verified(steps, case).rows


@pytest.mark.parametrize("kind", ["dsa", "c4a", "swa"])
@WORLDS
def test_batch_file_finds_its_context_in_the_caches(kind, world):
    """A decode with drafts, a continued prompt and a fresh one; the first two share a block."""
    case = Case(kind, 16, world, budget={"num_speculative_tokens": 2})
    block = case.settings.topology.virtual_block
    lens = {
        "seq_lens": [block + 10, block + 20, 7],
        "query_lens": [3, 12, 7],
        "prompt_lens": [block + 2, block + 20, 7],
    }
    batch = Batch.from_lens(*lens.values(), block_tables=[[5, 2], [5, 4], [1]])
    assert verified(batch_steps(batch, case.settings, "a batch"), case).rows
    free = batch_steps(Batch.from_lens(*lens.values()), case.settings, "a batch without tables")
    assert free.batches[0].block_tables.tolist() == [[1, 2], [3, 4], [5, 0]]
    assert verified(free, case).rows


@pytest.mark.parametrize("world", [BOTH, PCP], ids=["pcp-dcp", "pcp"])
def test_a_step_without_tokens_for_anybody_but_one_request(world):
    """Requests without tokens this step keep their places."""
    case = Case("dsa", 1, world)
    batch = Batch.from_lens([20, 30, 9], [0, 1, 9], [20, 29, 9])
    assert verified(batch_steps(batch, case.settings, "idle"), case).rows
