"""Groups and collectives on NCCL: who is in them, in which order, and what arrives."""

import torch

from cpkit.comm.connect import make_comm
from cpkit.comm.simulated import run_ranks
from cpkit.merge import merge_shards
from cpkit.topology import GROUPS, Topology
from multi_gpu_tests.worlds import worlds
from tests.comm.mixed import without_sites


def moves(comm):
    """Every collective over every group, on values that tell who sent them; and what the ledger says of it."""
    out = {}
    for name in GROUPS:
        size = comm.group(name).size
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
            own = torch.arange(2 * size * 3, device=comm.device).view(2 * size, 3).to(dtype) + comm.rank
            out[name, "gather", dtype] = comm.all_gather(own, name, what="x")
            out[name, "exchange", dtype] = comm.all_to_all(own, name, what="x")
            if dtype != torch.uint8:
                out[name, "scatter", dtype] = comm.reduce_scatter(own, name, what="x")
    return {key: value.cpu() for key, value in out.items()}, without_sites(comm.ledger.take())


def merged(comm):
    """Partial outputs of 8 heads a rank of the DCP group, one of them without keys and full of NaN."""
    generator = torch.Generator().manual_seed(comm.rank)
    heads = 4 * comm.group("dcp").size
    out = torch.randn(5, heads, 16, generator=generator)
    lse = torch.randn(5, heads, generator=generator)
    out[comm.rank % 5], lse[comm.rank % 5] = float("nan"), float("-inf")
    shards = {
        merge: merge_shards(comm, out.to(comm.device), lse.to(comm.device), merge=merge) for merge in ("ag_rs", "a2a")
    }
    return {name: [part.cpu() for part in pair] for name, pair in shards.items()}


def test_collectives(job):
    for world in worlds(job.world_size):
        topology = Topology(**world)
        with make_comm(topology, kind="torch", device="cuda", timeout_s=60) as comm:
            found, issued = moves(comm)
        simulated, listed = run_ranks(topology, moves)[job.rank]
        assert found.keys() == simulated.keys() and issued == listed, world
        for key, expected in simulated.items():
            assert torch.equal(found[key], expected), (world, key)


def test_merge(job):
    for world in worlds(job.world_size):
        topology = Topology(**world)
        with make_comm(topology, kind="torch", device="cuda", timeout_s=60) as comm:
            found = merged(comm)
        for name, expected in run_ranks(topology, merged)[job.rank].items():
            for part, whole in zip(found[name], expected, strict=True):
                torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6, msg=f"{world} {name}")
