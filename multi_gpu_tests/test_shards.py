"""Keys that a collective gathered are scored as they lie, on GPUs: the bits of the same keys put into token order."""

import random

import pytest
import torch

from cpkit.comm.connect import make_comm
from cpkit.comm.key_gather import in_turn, make_key_gather
from cpkit.kernels.gather_keys import gather_keys
from cpkit.kernels.gpu_kind import gpu_kind
from cpkit.kernels.indexer_topk import indexer_topk
from cpkit.kernels.key_shards import KeyShards
from cpkit.kernels.mqa_logits import mqa_logits
from multi_gpu_tests.worlds import one_dcp_group
from tests.comm.key_shards import DIM, check_keys, workspace

LENS = [[1, 300, 65, 0, 191], [5, 6001, 0, 7333], [640]]
"""Requests of each workspace; one is long enough for lists of what passes a bound."""
ROWS, KEPT = 203, 512


def operands(lens, extents, heads, device):
    """Query tokens of all requests, from the start of their keys or from inside; the same on every rank."""
    rng, generator = random.Random(heads), torch.Generator(device).manual_seed(heads)
    begins = [sum(extents[:request]) for request in range(len(lens))]
    start, end = [], []
    for request in sorted(rng.choice([at for at, length in enumerate(lens) if length]) for _ in range(ROWS)):
        last = rng.randint(1, lens[request])
        start.append(begins[request] + rng.choice([0, rng.randint(0, last)]))
        end.append(begins[request] + last)
    q = torch.randn(ROWS, heads, DIM, generator=generator, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(ROWS, heads, generator=generator, device=device)
    return q, weights, *(torch.tensor(one, dtype=torch.int32, device=device) for one in (start, end))


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("interleave", [64, 128])
def test_shards_score_as_their_keys_in_order(job, interleave, heads):
    with make_comm(one_dcp_group(job.world_size), kind="torch", device="cuda", timeout_s=60) as comm:
        gather = make_key_gather(comm, "collective", dim=DIM, max_keys=20_000, backend="triton", timeout_s=30)
        made = [workspace(comm, lens, interleave, step) for step, lens in enumerate(LENS)]
        found = in_turn(gather, [(cache, table) for cache, table, _ in made], interleave=interleave)
        for lens, (_, _, extents), shards in zip(LENS, made, found, strict=True):
            assert isinstance(shards, KeyShards)
            q, weights, start, end = operands(lens, extents, heads, comm.device)
            logits, kept = [], []
            for keys in (shards, gather_keys(shards, backend="triton")):
                check_keys(keys, lens, extents, lens)
                logits.append(mqa_logits(q, keys, weights, start, end, outside="-inf"))
                room = 4 * logits[0].numel() // 3
                kept.append(indexer_topk(q, keys, weights, start, end, KEPT, workspace_bytes=room))
            assert torch.equal(*logits) and torch.equal(*kept), lens
            assert not logits[0].isnan().any()


@pytest.mark.parametrize(
    ("lens", "interleave"),
    [
        pytest.param([300, 65], 1, id="tokens-in-turn"),
        pytest.param([300, 65], 96, id="turns-of-broken-tiles"),
        pytest.param([9, 5], 64, id="few-keys"),
    ],
)
def test_shards_that_hopper_does_not_read_come_in_order(job, lens, interleave):
    with make_comm(one_dcp_group(job.world_size), kind="torch", device="cuda", timeout_s=60) as comm:
        gather = make_key_gather(comm, "collective", dim=DIM, max_keys=400, backend="triton", timeout_s=30)
        cache, table, extents = workspace(comm, lens, interleave, 0)
        keys = gather.start(cache, table, interleave=interleave).wait()
        assert gpu_kind(comm.device) != "hopper" or not isinstance(keys, KeyShards)
        check_keys(keys, lens, extents, lens)


def test_gathered_buffers_do_not_pile_up(job):
    """The host runs ahead of a device that is kept busy: what bounds memory is that readers come before writers."""
    with make_comm(one_dcp_group(job.world_size), kind="torch", device="cuda", timeout_s=60) as comm:
        gather = make_key_gather(comm, "collective", dim=DIM, max_keys=1 << 15, backend="triton", timeout_s=30)
        cache, table, _ = workspace(comm, [1 << 14], 64, 0)
        size = (1 << 14) * (DIM + 4)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
        for keys in in_turn(gather, [(cache, table)] * 12, interleave=64):
            assert keys.packed.numel() == size
            torch.cuda._sleep(2_000_000)
            keys.packed.view(torch.int64).sum()  # of bytes torch would make int64 first, eight times as much
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
        assert peak < 5 * size, f"{peak / size:.1f} times the keys of all ranks after 12 gathers"
