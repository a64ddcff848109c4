"""Worlds and batches to plan and check: small, at edges, with block tables that belong together."""

import numpy as np
from hypothesis import strategies as st

from cpkit.batch import Batch
from cpkit.budget import Budget
from cpkit.model import load_model
from cpkit.step import plan_step
from cpkit.topology import Topology, legal_dcp_sizes

MODELS = {
    name: load_model(name) for name in ("deepseek-v3.2", "deepseek-v4-flash", "glm-5.3-flash", "deepseek-v4.1-flash")
}

INTERLEAVES = {
    "deepseek-v3.2": ((1, 64), (64, 64), (5, 20), (8, 32)),
    "deepseek-v4-flash": ((128, 256), (256, 256)),
    "glm-5.3-flash": ((16, 64), (64, 64)),
    "deepseek-v4.1-flash": ((4, 64), (128, 256)),
}
"""(interleave, block_size) that a model can be sharded with."""

PARTITIONS = ("head_tail", "head_tail_even", "contiguous", "round_robin")


def block_tables(seq_lens, virtual_block, *, seed=0):
    """One row of block ids a request, each id used once, in no order; unused columns are the null block 0."""
    counts = [-(-seq_len // virtual_block) for seq_len in seq_lens]
    ids = iter(np.random.default_rng(seed).permutation(sum(counts)) + 1)
    return [[int(next(ids)) for _ in range(count)] for count in counts]


def make_batch(requests, topology, *, tables=True):
    """A batch from (computed, query_len, prompt_len) of each request, in any order."""
    seq_lens = [computed + query for computed, query, _ in requests]
    return Batch.from_lens(
        seq_lens,
        [query for _, query, _ in requests],
        [prompt for *_, prompt in requests],
        block_tables=block_tables(seq_lens, topology.virtual_block) if tables else None,
    )


def plan_ranks(batch, topology, model, budget, **options):
    """One plan a rank, each made on its own."""
    return [plan_step(batch, topology, model, budget, rank=rank, **options) for rank in range(topology.replica_size)]


@st.composite
def topologies(draw, model):
    pcp, tp = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (16, 1)]))
    dcp = draw(st.sampled_from(legal_dcp_sizes(tp, pcp))) if pcp != 3 else 1
    interleave, block_size = draw(st.sampled_from(INTERLEAVES[model]))
    return Topology(pcp=pcp, tp=tp, dcp=dcp, interleave=interleave, block_size=block_size)


@st.composite
def requests(draw):
    """(computed, query_len, prompt_len): decodes, drafts, prefills from their start, resumed, short, empty."""
    kind = draw(st.sampled_from(["decode", "draft", "prefill", "resumed", "past-the-prompt", "nothing"]))
    computed = draw(st.sampled_from([1, 63, 64, 65, 127, 128, 1000]) | st.integers(1, 700))
    query = draw(st.sampled_from([1, 2, 7, 64, 255, 256, 257]) | st.integers(1, 300))
    if kind == "decode":
        return computed, 1, computed
    if kind == "draft":
        return computed, min(query, 4), max(1, computed - 5)
    if kind == "prefill":
        return 0, query, query + draw(st.integers(0, 3))
    if kind == "resumed":
        return computed, query, computed + query
    if kind == "past-the-prompt":
        return computed, query, computed + draw(st.integers(1, query))
    return computed, 0, draw(st.sampled_from([computed, computed + 5]))


@st.composite
def budgets(draw, topology):
    """From one round of the ranks' turns (whose contexts are cut into key spans and query runs) to plenty."""
    turn = topology.dcp * max(topology.interleave, 128)
    workspace = draw(st.sampled_from([turn, turn + 1, 3 * turn, 1 << 22]))
    logits = draw(st.sampled_from([turn, turn + 1, 2 * turn + 1, 40 * turn, 1 << 27]))
    threshold = draw(st.sampled_from([0, 3]))
    return Budget(workspace, 4 * logits, num_speculative_tokens=threshold)
