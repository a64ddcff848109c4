"""The indexer page: values first, scales behind, byte by byte."""

import numpy as np
import pytest
import torch

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.fp8 import quantize_fp8
from cpkit.kernels.index_cache import (
    gather_index_keys,
    insert_index_keys,
    pack_index_keys,
    quantize_index_keys,
    unpack_index_keys,
)
from tests.kernels.pages import GARBAGE, e4m3_byte, fp32_bytes, page_cache, put
from tests.kernels.test_fp8 import slow_group
from tests.kernels.test_paged_rows import BACKENDS, INTERPRETED

EXACT = [0.0, 1.0, -3.0, 448.0, 2.0**-9, -0.4375]


def test_a_page_byte_by_byte():
    cache, want = page_cache(3, 2 * (4 + 4)), page_cache(3, 2 * (4 + 4))
    values = torch.tensor([[1.0, -3.0, 448.0, 0.0], [2.0**-9, -0.4375, 2.0, 1.5], [7.0, 7.0, 7.0, 7.0]])
    scales, slots = torch.tensor([0.25, 3e-7, 9.0]), torch.tensor([5, 2, -1])
    insert_index_keys(cache, values.to(torch.float8_e4m3fn), scales, slots, block_size=2)
    for slot, row, scale in zip([5, 2], values.tolist(), scales.tolist(), strict=False):
        put(want, slot, 2, [e4m3_byte(v) for v in row], fp32_bytes(scale))
    assert torch.equal(cache, want)


@pytest.mark.parametrize("num_keys", [0, 1, 63, 64, 65])
def test_what_is_inserted_is_gathered(num_keys):
    rng = np.random.default_rng(num_keys)
    values, scales = quantize_fp8(torch.from_numpy(rng.normal(size=(num_keys, 128))).float())
    cache = page_cache(3, 64 * 132, 64 * 132 + 12)
    slots = torch.from_numpy(rng.permutation(192)[:num_keys])
    insert_index_keys(cache, values, scales[:, 0], slots, block_size=64)
    order = torch.from_numpy(rng.permutation(num_keys))
    asked = torch.cat([slots[order], torch.tensor([-1, 192])])
    got_values, got_scales = gather_index_keys(cache, asked, block_size=64)
    assert got_values.dtype == torch.float8_e4m3fn and got_values.is_contiguous() and got_scales.is_contiguous()
    assert torch.equal(got_values[:num_keys].float(), values[order].float())
    assert torch.equal(got_scales[:num_keys], scales[order, 0])
    assert (got_values[num_keys:].float() == 0).all() and (got_scales[num_keys:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize(("block_size", "gap"), [(1, 0), (2, 4), (16, 16)])
def test_quantized_keys_land_byte_by_byte(block_size, gap, pow2, backend):
    """Keys without a slot are not looked at: they are NaN, and make nobody else so."""
    rng = np.random.default_rng(block_size)
    num_keys, dim, num_blocks = 40, 8, 40 // block_size + 1
    keys = torch.from_numpy(rng.normal(size=(num_keys, dim)) * 10.0 ** rng.uniform(-7, 4, (num_keys, 1))).bfloat16()
    slots = rng.permutation(num_blocks * block_size)[:num_keys]
    for away, slot in enumerate([-1, num_blocks * block_size, 2**40, -(2**40)]):
        slots[away * 7] = slot
        keys[away * 7] = float("nan")
    cache, want = (page_cache(num_blocks, block_size * (dim + 4), block_size * (dim + 4) + gap) for _ in range(2))
    for key, slot in zip(keys.float().tolist(), slots.tolist(), strict=True):
        if 0 <= slot < num_blocks * block_size:
            values, scale = slow_group(key, pow2)
            put(want, slot, block_size, [e4m3_byte(v) or signed_zero(k) for v, k in zip(values, key, strict=True)],
                fp32_bytes(scale))  # fmt: skip
    quantize_index_keys(cache, keys, torch.from_numpy(slots), block_size=block_size, pow2_scales=pow2, backend=backend)
    assert torch.equal(cache, want)
    if gap:
        whole = torch.as_strided(cache, (num_blocks * cache.stride(0),), (1,)).view(num_blocks, -1)
        assert (whole[:, -gap:] == GARBAGE).all()


def signed_zero(value):
    """The code of a zero that a value was rounded to."""
    return 0x80 if value < 0 else 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantizing_nothing_touches_nothing(backend):
    cache, slots = page_cache(2, 16), torch.zeros(0, dtype=torch.int64)
    quantize_index_keys(cache, torch.zeros(0, 4), slots, block_size=2, backend=backend)
    quantize_index_keys(cache[:0], torch.ones(1, 4), torch.tensor([0]), block_size=2, backend=backend)
    assert (cache == GARBAGE).all()


@INTERPRETED
@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"keys": torch.ones(1, 6)}, "multiple of 4", id="no-whole-words"),
        pytest.param({"keys": torch.ones(2, 4)}, "keys", id="keys-of-other-slots"),
        pytest.param({"block_size": 3}, "at least 24 bytes", id="page-too-small"),
        pytest.param({"slots": torch.tensor([0], dtype=torch.int32)}, "slots is int32", id="int32-slots"),
        pytest.param({"cache": torch.zeros(2, 18, dtype=torch.uint8)}, "18 bytes apart", id="pages-off-their-words"),
        pytest.param({"keys": torch.ones(5)[1:].view(1, 4)}, "start at byte 4 of 16", id="keys-not-aligned"),
    ],
)
def test_what_the_quantizing_kernel_refuses(change, words):
    call = {"cache": page_cache(2, 16), "keys": torch.ones(1, 4), "slots": torch.tensor([0]), "block_size": 2} | change
    with pytest.raises(PlanError, match=words):
        quantize_index_keys(**call, backend="triton")


def test_packed_rows_travel_and_come_back():
    values, scales = torch.tensor([EXACT]).to(torch.float8_e4m3fn), torch.tensor([0.125])
    rows = pack_index_keys(values, scales)
    assert rows[0].tolist() == [e4m3_byte(v) for v in EXACT] + list(fp32_bytes(0.125))
    back = unpack_index_keys(torch.cat([rows, rows])[1:])
    assert torch.equal(back[0].float(), values.float()) and torch.equal(back[1], scales)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"values": torch.ones(1, 4)}, PlanError, "float8_e4m3fn", id="not-quantized"),
        pytest.param({"scales": torch.ones(2)}, PlanError, "scales", id="scales-of-other-keys"),
        pytest.param({"slots": torch.tensor([0, 1])}, PlanError, "rows", id="slots-of-other-keys"),
        pytest.param({"backend": "cuda"}, ConfigError, "triton", id="backend-not-built"),
    ],
)
def test_refusals(change, error, words):
    call = {
        "cache": page_cache(1, 16),
        "values": torch.ones(1, 4).to(torch.float8_e4m3fn),
        "scales": torch.ones(1),
        "slots": torch.tensor([0]),
        "block_size": 2,
    } | change
    with pytest.raises(error, match=words):
        insert_index_keys(**call)
