"""The 656-byte and 584-byte cache rows, byte by byte, and what comes back out of them."""

import numpy as np
import pytest
import torch

from cpkit.errors import PlanError
from cpkit.kernels import latent_cache as cache_rows
from tests.kernels.pages import bf16_bytes, e4m3_byte, fp32_bytes, page_cache, put

V32 = (
    576,
    656,
    cache_rows.pack_v32_rows,
    cache_rows.unpack_v32_rows,
    cache_rows.insert_v32_rows,
    cache_rows.gather_v32_rows,
)
V4 = (
    512,
    584,
    cache_rows.pack_v4_rows,
    cache_rows.unpack_v4_rows,
    cache_rows.insert_v4_rows,
    cache_rows.gather_v4_rows,
)
BOTH = [pytest.param(V32, id="v32"), pytest.param(V4, id="v4")]


def exact_latent(rng, num_keys, dim, group):
    """Whole numbers up to 7 times a power of two per group, 7 among them: their scale is that power over 64."""
    latent = rng.integers(-7, 8, (num_keys, dim)).astype(np.float64)
    latent[:, ::group] = 7
    powers = 2.0 ** rng.integers(-3, 4, (num_keys, dim // group))
    latent[:, : dim // group * group] *= np.repeat(powers, group, axis=1)
    return torch.from_numpy(latent).float(), powers / 64


def test_a_v32_page_byte_by_byte():
    latent, scales = exact_latent(np.random.default_rng(0), 2, 576, 128)
    cache, want = page_cache(2, 3 * 656), page_cache(2, 3 * 656)
    cache_rows.insert_v32_rows(cache, cache_rows.pack_v32_rows(latent), torch.tensor([4, 0]), block_size=3)
    for slot, row, row_scales in zip([4, 0], latent.tolist(), scales.tolist(), strict=True):
        row_bytes = bytes(e4m3_byte(row[i] / row_scales[i // 128]) for i in range(512))
        row_bytes += b"".join(map(fp32_bytes, row_scales)) + b"".join(map(bf16_bytes, row[512:]))
        put(want, slot, 3, row_bytes, b"")
    assert torch.equal(cache, want)


def test_a_v4_page_byte_by_byte():
    latent, scales = exact_latent(np.random.default_rng(1), 2, 512, 64)
    cache, want = page_cache(2, 3 * 584, 3 * 584 + 24), page_cache(2, 3 * 584, 3 * 584 + 24)
    cache_rows.insert_v4_rows(cache, cache_rows.pack_v4_rows(latent), torch.tensor([4, 0]), block_size=3)
    for slot, row, row_scales in zip([4, 0], latent.tolist(), scales.tolist(), strict=True):
        main = bytes(e4m3_byte(row[i] / row_scales[i // 64]) for i in range(448)) + b"".join(map(bf16_bytes, row[448:]))
        side = [int(np.log2(scale)) + 127 for scale in row_scales[:7]] + [0]
        put(want, slot, 3, main, side)
    assert torch.equal(cache, want)


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("num_keys", [0, 1, 15, 16, 17])
def test_exact_values_come_back_unchanged(form, num_keys):
    dim, row_bytes, pack, unpack, insert, gather = form
    rng = np.random.default_rng(num_keys)
    latent, _ = exact_latent(rng, num_keys, dim, 64)
    cache = page_cache(2, 16 * row_bytes, 16 * row_bytes + 192)
    slots = torch.from_numpy(rng.permutation(32)[:num_keys])
    insert(cache, pack(latent.bfloat16()), slots, block_size=16)
    back = unpack(gather(cache, torch.cat([slots, torch.tensor([-1, 32])]), block_size=16))
    assert back.dtype == torch.float32
    assert torch.equal(back[:num_keys], latent)
    assert (back[num_keys:] == 0).all()


@pytest.mark.parametrize("form", BOTH)
def test_random_values_come_back_within_half_a_step(form):
    """e4m3 keeps 4 significant bits: 1/16 of a value, or half the least step of its group."""
    dim, _, pack, unpack, _, _ = form
    rng = np.random.default_rng(7)
    latent = torch.from_numpy(rng.normal(size=(50, dim)) * 10.0 ** rng.uniform(-3, 3, (50, 1))).float()
    fp8 = dim - 64
    group = 128 if dim == 576 else 64
    amax = latent[:, :fp8].abs().view(50, -1, group).amax(2).repeat_interleave(group, 1)
    error = (unpack(pack(latent)) - latent).abs()
    bound = torch.maximum(latent[:, :fp8].abs() / 16, amax / 448 * 2 * 2.0**-10)
    assert (error[:, :fp8] <= bound * 1.001).all()
    assert (error[:, fp8:] <= latent[:, fp8:].abs() / 256).all()


def test_v32_scales_may_be_powers_of_two():
    latent = torch.from_numpy(np.random.default_rng(3).normal(size=(4, 576))).float()
    rows = cache_rows.pack_v32_rows(latent, pow2_scales=True)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    assert (torch.frexp(scales).mantissa == 0.5).all()


@pytest.mark.parametrize("form", BOTH)
def test_nan_of_one_row_stays_in_it(form):
    dim, _, pack, unpack, _, _ = form
    latent = torch.ones(3, dim)
    latent[1] = float("nan")
    back = unpack(pack(latent))
    assert back[1].isnan().all() and torch.equal(back[[0, 2]], latent[[0, 2]])


@pytest.mark.parametrize("form", BOTH)
def test_refusals(form):
    dim, row_bytes, pack, unpack, insert, gather = form
    with pytest.raises(PlanError, match=f"{dim}"):
        pack(torch.ones(2, dim - 1))
    with pytest.raises(PlanError, match="rows"):
        unpack(torch.zeros(2, row_bytes + 1, dtype=torch.uint8))
    with pytest.raises(PlanError, match="rows"):
        insert(page_cache(1, row_bytes), torch.zeros(1, 132, dtype=torch.uint8), torch.tensor([0]), block_size=1)
    with pytest.raises(PlanError, match="pages of"):
        gather(page_cache(1, 2 * row_bytes - 1), torch.tensor([0]), block_size=2)
