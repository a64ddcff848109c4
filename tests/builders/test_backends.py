"""Random steps built by both backends: every tensor of every builder the same, on every path of every chip.

That the torch backend's are right is for the other files to say.
"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from cpkit.builders.backend import choose_backend
from cpkit.builders.chip import Chip
from cpkit.builders.indexer import IndexerBuilder, IndexerConfig
from cpkit.builders.kpool import KpoolBuilder, KpoolConfig
from cpkit.builders.swa import SwaBuilder, SwaConfig
from cpkit.errors import ConfigError
from cpkit.kernels.backends import BACKENDS
from cpkit.topology import Shard
from tests.gpu.check_builders import BLOCK, WIDTH, budget, random_batch, tensors_of

CPU = torch.device("cpu")


def assert_same(builds):
    """Both backends' results have the same tensors."""
    torch_made, triton_made = map(tensors_of, builds)
    assert torch_made.keys() == triton_made.keys()
    for name, tensor in torch_made.items():
        assert torch.equal(tensor, triton_made[name]), f"{name}: {tensor.tolist()} and {triton_made[name].tolist()}"


@pytest.mark.parametrize(("pcp_size", "dcp_size"), [(1, 1), (1, 3), (2, 1), (2, 2)])
@pytest.mark.parametrize(("family", "drafts", "ratio"), [(80, 2, 1), (90, 1, 4), (90, 3, 1), (100, 2, 4)])
def test_indexers(pcp_size, dcp_size, family, drafts, ratio):
    shard = Shard(pcp_size, 0, dcp_size, dcp_size - 1, 4)
    chip = Chip("cuda", family=family, num_workers=7)
    config = IndexerConfig(budget(drafts), chip, shard, BLOCK, WIDTH, ratio)
    batch = random_batch(random.Random(drafts + ratio), "cpu", drafts, pcp_size=pcp_size)
    batch = replace(batch, row_stride=torch.full_like(batch.seq_lens, 2))
    gather = partial(torch.tile, dims=(pcp_size,))  # all PCP ranks send what this one sends
    assert_same(IndexerBuilder(config, gather_slots=gather, backend=one).build(batch) for one in BACKENDS)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_windows_and_tails(seed, causal):
    chip = Chip("cuda", family=90, num_workers=7)
    config = SwaConfig(budget(seed), chip, 20, BLOCK, 1000, 5000, (1, 4, 128), index_topk=64, draft_blocks=True)
    batch = random_batch(random.Random(seed), "cpu", seed, decodes_only=not causal)
    first = torch.arange(batch.num_rows, dtype=torch.int32) * 40
    batch = replace(batch, causal=causal, replay_start=first if seed else None)
    assert_same(SwaBuilder(config, backend=one).build(batch) for one in BACKENDS)
    assert_same(KpoolBuilder(KpoolConfig(budget(seed), 4), backend=one).build(batch) for one in BACKENDS)


def test_a_large_step_leaves_nothing_in_a_small_one():
    """Stale buffers: the second build of a builder is that of a fresh one, to the end of every buffer."""
    config = SwaConfig(budget(1), Chip("cuda", family=90, num_workers=7), 20, BLOCK, 1000, 5000)
    large, small = (random_batch(random.Random(seed), "cpu", 1) for seed in (4, 5))
    used, fresh = (SwaBuilder(config, backend="triton") for _ in range(2))
    used.build(large)
    assert_same([fresh.build(small), used.build(small)])
    for name in ("_token_to_req", "_decode_indices", "_prefill_indices", "_prefill_lens"):
        assert torch.equal(getattr(used, name).tensor, getattr(fresh, name).tensor), name


def test_backends_by_device():
    assert choose_backend(None, CPU) == "torch"
    assert choose_backend(None, torch.device("cuda")) == "triton"
    assert choose_backend("torch", torch.device("cuda")) == "torch"
    with pytest.raises(ConfigError, match="backend='cuda': name one of torch, triton"):
        choose_backend("cuda", CPU)
