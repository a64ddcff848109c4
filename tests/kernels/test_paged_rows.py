"""Rows of bytes in pages against single bytes put at plain offsets."""

import numpy as np
import pytest
import torch

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.paged_rows import read_rows, write_rows
from tests.kernels.pages import GARBAGE, page_cache, put

BACKENDS = ("torch",) if torch.cuda.is_available() else ("torch", "triton")
"""Where there is a GPU kernels are compiled, and take its tensors alone: tests/gpu/check_gather.py."""
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, and take a GPU's tensors")
FORMATS = [pytest.param(132 - 4, 4, id="index"), pytest.param(656, 0, id="v32"), pytest.param(576, 8, id="v4")]


def random_rows(rng, num_rows, row_bytes):
    return torch.from_numpy(rng.integers(0, 255, (num_rows, row_bytes), dtype=np.uint8))


@pytest.mark.parametrize(("main", "side"), FORMATS)
@pytest.mark.parametrize("block_size", [1, 3, 64])
@pytest.mark.parametrize("gap", [0, 40], ids=["pages-touch", "pages-apart"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_written_rows_land_where_bytes_put_by_hand_do(main, side, block_size, gap, backend):
    rng = np.random.default_rng(main + block_size)
    page, num_blocks = block_size * (main + side), 4
    cache = page_cache(num_blocks, page, page + gap)
    want = page_cache(num_blocks, page, page + gap)
    capacity = num_blocks * block_size
    slots = [*rng.permutation(capacity)[: max(1, capacity // 2)].tolist(), -1, -7, capacity, 2**40, -(2**40)]
    rows = random_rows(rng, len(slots), main + side)
    write_rows(cache, rows, torch.tensor(slots), block_size=block_size, side_bytes=side, backend=backend)
    for slot, row in zip(slots, rows.tolist(), strict=True):
        if 0 <= slot < capacity:
            put(want, slot, block_size, row[:main], row[main:])
    size = (num_blocks * (page + gap),)
    assert torch.equal(torch.as_strided(cache, size, (1,)), torch.as_strided(want, size, (1,)))

    read = {"block_size": block_size, "main_bytes": main, "side_bytes": side}
    back = read_rows(cache, torch.tensor(slots), **read, backend=backend)
    inside = torch.tensor([0 <= slot < capacity for slot in slots])
    assert torch.equal(back[inside], rows[inside])
    assert (back[~inside] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_touch_nothing(backend):
    cache, none = page_cache(2, 16), torch.zeros(0, dtype=torch.int64)
    write_rows(cache, torch.zeros(0, 8, dtype=torch.uint8), none, block_size=2, side_bytes=4, backend=backend)
    assert (cache == GARBAGE).all()
    read = {"block_size": 2, "main_bytes": 4, "side_bytes": 4, "backend": backend}
    assert read_rows(cache, none, **read).shape == (0, 8)
    assert read_rows(cache[:0], torch.tensor([0]), **read).tolist() == [[0] * 8]


def test_rows_of_a_wider_buffer():
    wide = torch.arange(40, dtype=torch.uint8).view(4, 10)
    cache = page_cache(2, 12)
    write_rows(cache, wide[:, 2:8], torch.tensor([0, 1, 2, 3]), block_size=2, side_bytes=2)
    back = read_rows(cache, torch.tensor([3, 0]), block_size=2, main_bytes=4, side_bytes=2)
    assert back.tolist() == [wide[3, 2:8].tolist(), wide[0, 2:8].tolist()]


@INTERPRETED
@pytest.mark.parametrize("width", [12, 24, 48], ids=["4-bytes", "8-bytes", "16-bytes"])
def test_the_kernel_takes_rows_of_a_wider_buffer(width):
    wide = torch.arange(4 * width, dtype=torch.uint8).view(4, width)
    cache = page_cache(2, 16)
    write_rows(cache, wide[:, :8], torch.tensor([0, 1, 2, 3]), block_size=2, side_bytes=4, backend="triton")
    back = read_rows(cache, torch.tensor([3, 0]), block_size=2, main_bytes=4, side_bytes=4)
    assert back.tolist() == [wide[3, :8].tolist(), wide[0, :8].tolist()]


@INTERPRETED
def test_the_kernel_refuses_what_it_would_read_askew():
    cache, slots, rows = page_cache(2, 16), torch.tensor([0]), torch.zeros(1, 8, dtype=torch.uint8)
    with pytest.raises(PlanError, match=r"rows of 4 \+ 2 bytes: the kernel moves words of 4"):
        read_rows(cache, slots, block_size=2, main_bytes=4, side_bytes=2, backend="triton")
    askew = torch.zeros(12, dtype=torch.uint8)[4:].view(1, 8)
    with pytest.raises(PlanError, match=r"rows has strides .* starts at byte 4 of 16"):
        write_rows(cache, askew, slots, block_size=2, side_bytes=4, backend="triton")
    odd_pages = torch.zeros(2, 18, dtype=torch.uint8)
    with pytest.raises(PlanError, match="cache has strides"):
        write_rows(odd_pages, rows, slots, block_size=2, side_bytes=4, backend="triton")


@pytest.mark.parametrize(
    ("stride", "page"),
    [
        pytest.param(1_077_120, 1994, id="b127-1994"),
        pytest.param(1_039_680, 2066, id="b127-2066"),
        pytest.param(1_002_240, 2143, id="b127-2143"),
        pytest.param(3_600_000, 598, id="b129"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_past_2_31_bytes(stride, page, backend):
    """The real strides; memory that is never touched costs nothing."""
    assert page * stride > 2**31 - 1
    memory = torch.empty((page + 1) * stride, dtype=torch.uint8)
    cache = torch.as_strided(memory, (page + 1, 64 * 132), (stride, 1))
    near, far = 5, page * 64 + 63
    rows = torch.stack([torch.full((132,), 1, dtype=torch.uint8), torch.full((132,), 2, dtype=torch.uint8)])
    write_rows(cache, rows, torch.tensor([near, far]), block_size=64, side_bytes=4, backend=backend)
    assert memory[page * stride + 63 * 128] == 2
    assert memory[page * stride + 64 * 128 + 63 * 4 + 3] == 2
    back = read_rows(cache, torch.tensor([far, near]), block_size=64, main_bytes=128, side_bytes=4, backend=backend)
    assert torch.equal(back, rows.flip(0))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"slots": torch.tensor([0], dtype=torch.int32)}, PlanError, "slots", id="b47-int32-slots"),
        pytest.param({"rows": torch.zeros(2, 6, dtype=torch.uint8)}, PlanError, "rows", id="more-rows-than-slots"),
        pytest.param({"rows": torch.zeros(1, 6)}, PlanError, "uint8", id="rows-of-floats"),
        pytest.param({"block_size": 0}, PlanError, "block_size=0", id="no-block"),
        pytest.param({"block_size": 3}, PlanError, "at least 18", id="page-too-small"),
        pytest.param({"backend": "cuda"}, ConfigError, "built for torch, triton", id="backend-not-built"),
    ],
)
def test_refusals(change, error, words):
    call = {
        "cache": page_cache(2, 12),
        "rows": torch.zeros(1, 6, dtype=torch.uint8),
        "slots": torch.tensor([0]),
        "block_size": 2,
        "side_bytes": 2,
    } | change
    with pytest.raises(error, match=words):
        write_rows(**call)
