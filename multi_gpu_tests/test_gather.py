"""The key gather on GPUs: both paths give every key its place; a rank that dies or never comes ends in an error."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cpkit.activations.generate import Generated
from cpkit.comm.connect import make_comm
from cpkit.comm.key_gather import GATHERS, in_turn, make_key_gather
from cpkit.comm.symmetric import PeerGroup
from cpkit.errors import DesyncError, PlanError
from cpkit.kernels.key_shards import packed_bytes
from cpkit.kernels.table_keys import KeyTable, pull_table_keys
from cpkit.oracle import Oracle
from cpkit.run.execute import RunOptions, run_rank
from cpkit.worker.token_activations import TokenActivations
from multi_gpu_tests.worlds import one_dcp_group
from tests.comm.key_shards import BLOCK, DIM, STEPS, check_keys, workspace
from tests.worker.worlds import Case

LAST = Path(__file__).with_name("last_rank.py")


def orders(size):
    """A world with torch's order of ranks and, where there is one, a world with another."""
    return [one_dcp_group(size), one_dcp_group(size, 2)] if size % 4 == 0 else [one_dcp_group(size)]


@pytest.mark.parametrize("gather", ["collective", "symmetric"])
@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_every_key_finds_its_place(job, gather, interleave):
    for world in orders(job.world_size):
        with make_comm(world, kind="torch", device="cuda", timeout_s=60) as comm:
            options = {"dim": DIM, "max_keys": 400, "backend": "triton", "timeout_s": 30}
            gathers = make_key_gather(comm, gather, **options)
            for step, chunks in enumerate(STEPS):
                made = [workspace(comm, lens, interleave, step) for lens in chunks]
                found = in_turn(gathers, [(cache, table) for cache, table, _ in made], interleave=interleave)
                for lens, (_, _, extents), keys in zip(chunks, made, found, strict=True):
                    check_keys(keys, lens, extents, (gather, world, lens))
                gathers.check()
                sent = [(entry.op, entry.what, entry.bytes) for entry in comm.ledger.take()]
                sizes = [packed_bytes(table.num_keys, DIM) for _, table, _ in made if table.num_keys]
                assert sent == [("all_gather", "index_keys", size) for size in sizes]


@pytest.mark.parametrize("interleave", [1, 16])
def test_caches_are_read_where_they_lie(job, interleave):
    with make_comm(one_dcp_group(job.world_size), kind="torch", device="cuda", timeout_s=60) as comm:
        peers = PeerGroup(comm, "dcp", timeout_s=30)
        lens = [70, 0, 5, 131]
        cache, table, extents = workspace(comm, lens, interleave, 7)
        shared = peers.allocate(cache.numel())
        own = shared.own.view_as(cache)
        own.copy_(cache)
        peers.meet(0, what="index_keys")
        whole = torch.tensor(lens, dtype=torch.int32, device=comm.device)
        all_keys = KeyTable(table.local_start, table.block_tables, whole, table.num_keys, BLOCK)
        keys = pull_table_keys(shared.addresses, own, all_keys, DIM, interleave=interleave)
        check_keys(keys, lens, extents, "direct")
        peers.meet(0, what="index_keys")
        peers.check()


@pytest.mark.parametrize(("kind", "interleave"), [("dsa", 1), ("c4a", 16)])
def test_steps_select_the_same_keys_by_either_gather(job, kind, interleave):
    """Whole steps that gather chunks and key spans; they count the same collectives too."""
    tight = {"workspace_tokens": 512, "logits_bytes": 4 * 640, "max_num_batched_tokens": 48}
    case = Case(kind, interleave, {"pcp": job.world_size, "dcp": job.world_size}, budget=tight)
    steps, settings = case.steps, case.settings
    oracle = Oracle(TokenActivations(Generated(7, "exact"), steps.content, settings.model.num_heads))
    reports = []
    for gather in GATHERS:
        options = RunOptions(verify="all", backend="torch", gather=gather, timeout_s=30)
        with make_comm(settings.topology, kind="torch", device="cuda", timeout_s=60) as comm:
            reports.append(run_rank(comm, steps, settings, oracle, options))
        assert reports[-1].findings.first is None, f"{gather}: {reports[-1].findings.first}"
    assert len({report.selections for report in reports}) == 1
    assert reports[0].calls == reports[1].calls and reports[0].bytes == reports[1].bytes


def test_a_workspace_larger_than_the_buffers_is_refused(job):
    with make_comm(one_dcp_group(job.world_size), kind="torch", device="cuda", timeout_s=60) as comm:
        gather = make_key_gather(comm, "symmetric", dim=DIM, max_keys=10, backend="triton", timeout_s=30)
        cache, table, _ = workspace(comm, [70], 1, 0)
        with pytest.raises(PlanError, match="in buffers for 10"):
            gather.start(cache, table, interleave=1)


def test_a_rank_that_never_comes_is_named(job):
    with make_comm(one_dcp_group(job.world_size), kind="torch", device="cuda", timeout_s=60) as comm:
        gather = make_key_gather(comm, "symmetric", dim=DIM, max_keys=100, backend="triton", timeout_s=2)
        cache, table, _ = workspace(comm, [70], 1, 0)
        gather.start(cache, table, interleave=1).wait()
        gather.check()
        if job.rank != job.world_size - 1:
            began = time.monotonic()
            gather.start(cache, table, interleave=1).wait()
            with pytest.raises(DesyncError, match=f"waited 2 s for rank {job.world_size - 1} .* index_keys"):
                gather.check()
            assert time.monotonic() - began < 10
            with pytest.raises(DesyncError):
                gather.start(cache, table, interleave=1)
        comm.barrier("world")


def test_a_rank_that_dies_ends_the_others(job):
    """A job of its own, whose last rank kills itself between two gathers; run by one rank of this one."""
    if job.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranks = []
        for rank in range(job.world_size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world_size)}
            env = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the job's own store, not that of the job around it
            ranks.append(subprocess.Popen([sys.executable, LAST], env=env, stdout=subprocess.PIPE, text=True))
        try:
            said = [one.communicate(timeout=90)[0] for one in ranks]
        finally:
            for one in ranks:
                one.kill()
        assert ranks[-1].returncode == -signal.SIGKILL
        for one, text in zip(ranks[:-1], said, strict=False):
            assert one.returncode == 0 and f"waited 3 s for rank {job.world_size - 1}" in text, text
