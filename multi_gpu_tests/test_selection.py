"""Selection over DCP ranks on NCCL: what the ranks agree on is the selection of the whole rows, to the bit."""

import pytest

from cpkit.activations.generate import Generated
from cpkit.comm.connect import make_comm
from cpkit.comm.simulated import run_ranks
from cpkit.oracle import Oracle
from cpkit.run.execute import RunOptions, run_rank
from cpkit.topology import Topology
from cpkit.worker.token_activations import TokenActivations
from multi_gpu_tests.worlds import one_dcp_group
from tests.worker.hostile_selection import SPANS, expected, hostile_rows, select
from tests.worker.worlds import Case

K = 512
"""Of TOPK, so that all kernels take part."""
SIZES = {"prompts": (1300, 9, 1), "topk": K, "index_heads": 32}
"""Shards with more keys than are picked; the long prompt is prefilled over several steps."""
SPANNED = {"workspace_tokens": 512, "logits_bytes": 4 * 512 * 40}
"""Keys are scored in spans, tokens in runs."""


def dcp_worlds(size):
    """One DCP group over the job: of TP ranks alone, or in an order that is not torch's."""
    return [Topology(tp=size, dcp=size)] + ([one_dcp_group(size, 2)] if size % 4 == 0 else [])


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("interleave", [1, 5, 64])
def test_hostile_rows(job, interleave, spans):
    rows = hostile_rows(K)
    for world in dcp_worlds(job.world_size):
        with make_comm(world, kind="torch", device="cuda", timeout_s=60) as comm:
            for backend in ("torch", "triton"):
                options = {"interleave": interleave, "spans": SPANS[spans], "backend": backend}
                found = select(comm, list(rows.values()), K, **options).tolist()
                for (name, row), got in zip(rows.items(), found, strict=True):
                    assert got == expected(row, K), (name, world, backend)


def selections(comm, case, backend):
    source = TokenActivations(Generated(7, "exact"), case.steps.content, case.settings.model.num_heads)
    options = RunOptions(verify="none", backend=backend)
    return run_rank(comm, case.steps, case.settings, Oracle(source), options).selections


@pytest.fixture(scope="module")
def alone():
    """The selections of one rank that has all keys."""
    case = Case("dsa", 1, {}, **SIZES)
    return run_ranks(case.settings.topology, lambda comm: selections(comm, case, "torch"))[0]


@pytest.mark.parametrize("interleave", [1, 64])
@pytest.mark.parametrize("budget", [{}, SPANNED], ids=["one-span", "key-spans"])
def test_the_worker_selects_what_one_rank_alone_does(job, alone, interleave, budget):
    """Prefills, then decodes: every rank has all tokens, and so the whole selection."""
    case = Case("dsa", interleave, {"tp": job.world_size, "dcp": job.world_size}, budget=budget, **SIZES)
    with make_comm(case.settings.topology, kind="torch", device="cuda", timeout_s=60) as comm:
        assert selections(comm, case, "triton") == alone
