"""Whole steps of every kind of layer on NCCL: the simulation's selections to the bit, all as the oracle has it."""

import pytest

from cpkit.activations.generate import Generated
from cpkit.comm.connect import make_comm
from cpkit.comm.simulated import run_ranks
from cpkit.oracle import Oracle
from cpkit.run.execute import RunOptions, run_rank
from cpkit.worker.token_activations import TokenActivations
from multi_gpu_tests.worlds import worlds
from tests.worker.worlds import PARTITIONS, Case

TIGHT = {"workspace_tokens": 512, "logits_bytes": 4 * 640, "max_num_batched_tokens": 48, "num_speculative_tokens": 1}
KINDS = {"dsa": 1, "c4a": 16, "c128a": 128, "swa": 1}


def cases(kind, size):
    """The worlds of a size, partitions and merges going round, the second budget tight."""
    for number, world in enumerate(worlds(size)):
        for merge in ("ag_rs", "a2a") if world["dcp"] > 1 else ("ag_rs",):
            budget = TIGHT if number % 2 and kind != "c128a" else {}
            yield Case(kind, KINDS[kind], world, merge, PARTITIONS[number % 4], budget=budget)


def equals_the_simulation(job, case, options):
    """The job's step, and the simulation's on CPUs: the same keys and collectives, all rows as the oracle has them."""
    steps, settings = case.steps, case.settings
    oracle = Oracle(TokenActivations(Generated(7, "exact"), steps.content, settings.model.num_heads))

    def program(comm):
        return run_rank(comm, steps, settings, oracle, options)

    with make_comm(settings.topology, kind="torch", device="cuda", timeout_s=60) as comm:
        report = program(comm)
    assert report.findings.first is None, f"{case}: {report.findings.first}"
    simulated = run_ranks(settings.topology, program)[job.rank]
    assert report.selections == simulated.selections, str(case)
    assert report.calls == simulated.calls, str(case)
    assert report.findings.rows == simulated.findings.rows > 0, str(case)
    return report, simulated


@pytest.mark.parametrize("kind", KINDS)
def test_steps(job, kind):
    for case in cases(kind, job.world_size):
        equals_the_simulation(job, case, RunOptions(verify="all", backend="torch"))


def test_triton_selects_what_torch_does(job):
    """Sizes that the Triton kernels take: more keys than are picked, in prefills and in decodes."""
    for world in worlds(job.world_size):
        case = Case("dsa", 1, world, prompts=(700, 9), topk=512, index_heads=32)
        on_gpus, simulated = equals_the_simulation(job, case, RunOptions(verify="sample"))
        assert (on_gpus.backend, simulated.backend) == ("triton", "torch")
