"""Both backends write the same bytes, find the same rows, and read them alike."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cpkit.batch import Batch
from cpkit.kernels import fp8, index_cache, paged_rows, position_slots
from cpkit.planner.gather import GatherPlan
from cpkit.worker.attend import gathered_keys, stored_keys
from cpkit.worker.caches import make_caches
from cpkit.worker.places import Places
from cpkit.worker.score import quantize_queries
from tests.worker.worlds import Case

CPU = torch.device("cpu")
POOL = 5


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that are launched."""
    names = []
    for module in (fp8, index_cache, paged_rows, position_slots):
        for name in [name for name in vars(module) if name.startswith("_") and name.endswith("_kernel")]:
            kernel = getattr(module, name)

            def launch(grid, name=name, kernel=kernel):
                names.append(name)
                return kernel[grid]

            monkeypatch.setattr(module, name, type("Seen", (), {"__getitem__": lambda _, grid, f=launch: f(grid)})())
    return names


def pair_of(case):
    """The layer's caches by each backend."""
    layer = case.model.layers[0]
    topology = case.settings.topology
    return [make_caches(layer, topology, POOL, CPU, backend=backend) for backend in ("torch", "triton")]


def filled(case, seed=3):
    """Both, with rows in every other slot; -1 and a slot behind the pool keep nothing."""
    pair = pair_of(case)
    for caches in pair:
        random = torch.Generator().manual_seed(seed)
        for insert, num_slots, dim in (
            (caches.insert_latent, caches.num_latent_slots, caches.form.dim),
            (caches.insert_index, caches.num_latent_slots if caches.index is not None else 0, 128),
            (caches.insert_window, caches.num_window_slots, caches.form.dim),
        ):
            if num_slots:
                slots = torch.cat([torch.arange(0, num_slots, 2).flip(0), torch.tensor([-1, num_slots])])
                insert(torch.randn(len(slots), dim, generator=random).bfloat16(), slots)
    return pair


CASES = [Case("dsa", 1, {"tp": 2, "dcp": 2}), Case("c4a", 64), Case("c128a", 128), Case("swa", 64)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_caches_are_equal_to_the_byte(case, launched):
    torch_caches, triton_caches = filled(case)
    for name in ("latent", "index", "window"):
        one, other = getattr(torch_caches, name), getattr(triton_caches, name)
        assert (one is None) == (other is None)
        assert one is None or (torch.equal(one, other) and (one != 0xFF).any())
    assert {"_move_rows_kernel", "_quantize_index_keys_kernel"} >= set(launched) >= {"_move_rows_kernel"}
    assert ("_quantize_index_keys_kernel" in launched) == (torch_caches.index is not None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_read_alike(case):
    torch_caches, triton_caches = filled(case)
    slots = torch.tensor([4, -1, 0, 1 << 40, 2])
    if torch_caches.latent is not None:
        assert torch.equal(torch_caches.latent_rows(slots), triton_caches.latent_rows(slots))
    if torch_caches.window is not None:
        assert torch.equal(torch_caches.window_rows(slots), triton_caches.window_rows(slots))
    if torch_caches.index is not None:
        for one, other in zip(torch_caches.index_keys(slots), triton_caches.index_keys(slots), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_selected_keys_are_found_alike(launched):
    case = CASES[0]
    tables = np.array([[1, 3], [2, 4]], np.int32)
    plan = case.settings.plan(Batch.from_lens([200, 130], [3, 2], block_tables=tables))
    random = torch.Generator().manual_seed(5)
    positions = torch.randint(-1, 260, (5, 8), generator=random)  # some behind the request's keys
    for rank in plan.ranks:
        places = Places(plan, rank, CPU)
        found = [stored_keys(positions, places, caches) for caches in filled(case)]
        assert torch.equal(found[0].indices, found[1].indices) and (found[0].indices >= 0).any()
        assert torch.equal(*(keys.rows.view(torch.int32) for keys in found))  # bits: rows never written are NaN
    assert "_shard_slots_kernel" in launched


def test_gathered_keys_are_found_alike(launched):
    case = CASES[0]
    gather = GatherPlan(2, 1, 0, np.array([3, 2]), np.array([0, 1]))
    chunk = SimpleNamespace(gather=gather, key_span=(0, 6), row_start=0, row_stop=2)
    places = SimpleNamespace(rank=SimpleNamespace(rows=SimpleNamespace(num_tokens=np.array([1, 2]))))
    positions = torch.tensor([[5, 0, -1], [3, 1, 7], [2, 6, 0]])
    rows = torch.arange(10 * 656).view(10, 656).to(torch.uint8) % 100
    found = [gathered_keys(positions, chunk, places, rows, caches).indices for caches in pair_of(case)]
    # rank * 5 + start of the region + local index; positions 6 and 7 are behind the span
    assert found[0].tolist() == found[1].tolist() == [[7, 0, -1], [9, 8, -1], [4, -1, 3]]
    assert "_gathered_slots_kernel" in launched


@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_index_queries_are_quantized_alike(num_tokens, launched):
    random = torch.Generator().manual_seed(num_tokens)
    q = torch.randn(num_tokens, 32, 128, generator=random).bfloat16()
    weights = torch.randn(num_tokens, 32, generator=random)
    one, other = (quantize_queries(q, weights, backend=backend) for backend in ("torch", "triton"))
    assert torch.equal(one.q.view(torch.uint8), other.q.view(torch.uint8)) and torch.equal(one.weights, other.weights)
    assert ("_quantize_kernel" in launched) == (num_tokens > 0)
