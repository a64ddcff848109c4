"""Gathered keys in token order, and some of them picked, against keys dealt out one by one that tell which they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.gather_keys import gather_keys, keys_out, pick_keys, pull_keys, split_planes
from cpkit.kernels.key_shards import KeyShards, check_regions, packed_bytes
from tests.kernels.gathered import gathered_bytes, starts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")
DIM = 8


def name_of(region, key):
    """Bytes and scale of one key; no byte is 255, which marks what nobody wrote."""
    number = 1 + region * 900 + key
    return [number % 251, number // 251 % 251, *([number % 7] * (DIM - 2))], float(number)


def shards_of(lens, dcp_size, interleave):
    """Padded shards of each region, and what all ranks send, padding full of NaN."""
    held, packed = gathered_bytes(lens, dcp_size, interleave, DIM, name_of)
    return held, KeyShards(packed.to(DEVICE), starts(held, DEVICE), DIM, interleave)


def rows_of(keys):
    return list(zip(keys[0].view(torch.uint8).tolist(), keys[1].tolist(), strict=True))


def check(found, lens, held, dcp_size):
    rows = rows_of(found)
    assert len(rows) == dcp_size * sum(held)
    at = 0
    for region, (length, shard) in enumerate(zip(lens, held, strict=True)):
        for key in range(length):
            assert rows[at + key] == name_of(region, key), (region, key)
        at += shard * dcp_size


def pulled(shards):
    """Each rank's buffer by its address alone, as memory of another GPU is read."""
    keys = shards.keys_per_rank
    buffers = [torch.empty(packed_bytes(keys, DIM), dtype=torch.uint8, device=DEVICE) for _ in shards.packed]
    for buffer, values, scales in zip(buffers, *shards.by_rank(), strict=True):
        own = split_planes(buffer, keys, DIM)
        own[0].view(torch.uint8).copy_(values.view(torch.uint8))
        own[1].view(torch.int32).copy_(scales.view(torch.int32))
    peers = torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)
    out = keys_out(None, shards.num_keys, DIM, shards.packed.device)
    return pull_keys(peers, shards.local_start, keys, DIM, interleave=shards.interleave, out=out)


@pytest.mark.parametrize("backend", [*BACKENDS, "pull"])
@pytest.mark.parametrize(
    ("dcp_size", "interleave", "lens"),
    [
        pytest.param(1, 1, [5], id="one-rank"),
        pytest.param(2, 1, [3, 1], id="drawn"),
        pytest.param(2, 4, [3, 0, 9, 1], id="empty-region-and-shorter-than-a-turn"),
        pytest.param(3, 5, [0, 31, 0, 0, 2], id="odd"),
        pytest.param(4, 1, [1] * 70, id="regions-shorter-than-the-ranks"),
        pytest.param(2, 1, [127, 129], id="around-a-program"),
        pytest.param(2, 64, [128, 63], id="block-interleave"),
        pytest.param(2, 3, [0], id="no-keys"),
    ],
)
def test_every_key_finds_its_place(dcp_size, interleave, lens, backend):
    held, shards = shards_of(lens, dcp_size, interleave)
    if backend == "pull":
        found = pulled(shards) if shards.num_keys else gather_keys(shards)
    else:
        found = gather_keys(shards, backend=backend)
    check(found, lens, held, dcp_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dim", "lens", "aligned"),
    [(128, [21, 8], False), (128, [70, 3], True), (36, [4], False), (36, [30], True), (12, [1], False)],
)
def test_keys_that_fill_no_power_of_two_and_values_that_fill_no_lines(dim, lens, aligned, backend):
    def key_of(request, position):
        return [(request * 90 + position + at) % 199 for at in range(dim)], request * 100.0 + position

    held, packed = gathered_bytes(lens, 3, 2, dim, key_of)
    shards = KeyShards(packed.to(DEVICE), starts(held, DEVICE), dim, 2)
    assert shards.is_aligned == aligned
    everything = rows_of(gather_keys(shards, backend=backend))
    at = torch.arange(shards.num_keys - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    assert repr(rows_of(pick_keys(shards, at, backend=backend))) == repr(everything[::-1])  # padding is NaN
    for request, (length, first) in enumerate(zip(lens, shards.local_start.tolist(), strict=False)):
        want = [key_of(request, position) for position in range(length)]
        assert everything[3 * first : 3 * first + length] == want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lens", [pytest.param([40, 3, 20], id="several"), pytest.param([1, 1], id="one-each")])
def test_picked_keys_are_those_at_the_positions(lens, backend):
    _, shards = shards_of(lens, 3, 2)
    starts_at = shards.local_start.tolist()
    last = [3 * starts_at[request] + length - 1 for request, length in enumerate(lens)]
    positions = torch.tensor([last[1], 0, last[-1], 0, last[0]], dtype=torch.int32, device=DEVICE)
    found = rows_of(pick_keys(shards, positions, backend=backend))
    names = [(1, lens[1] - 1), (0, 0), (len(lens) - 1, lens[-1] - 1), (0, 0), (0, lens[0] - 1)]
    assert found == [name_of(*which) for which in names]
    assert rows_of(pick_keys(shards, positions[:0], backend=backend)) == []


@settings(max_examples=15)
@given(
    lens=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    dcp_size=st.integers(1, 5),
    interleave=st.integers(1, 5),
)
def test_the_kernel_is_the_materialised_index(lens, dcp_size, interleave):
    """Padding included, in which a place repeats a key of its region."""
    _, shards = shards_of(lens, dcp_size, interleave)
    if not shards.num_keys:
        return
    shards.packed.random_(0, 255)
    want = gather_keys(shards)
    everywhere = torch.arange(shards.num_keys, dtype=torch.int32, device=DEVICE)
    picked = pick_keys(shards, everywhere, backend="triton")
    for found in (gather_keys(shards, backend="triton"), picked, pulled(shards)):
        assert torch.equal(found[0].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(found[1].view(torch.int32), want[1].view(torch.int32))


def test_nothing_behind_the_result_is_written():
    held, shards = shards_of([5, 3], 2, 1)
    num_keys = 2 * sum(held)
    room = torch.full((num_keys + 64, DIM), 255, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((num_keys + 64,), -7.0, device=DEVICE)
    out = room[:num_keys].view(torch.float8_e4m3fn), scales[:num_keys]
    check(gather_keys(shards, out=out, backend="triton"), [5, 3], held, 2)
    assert (room[num_keys:] == 255).all() and (scales[num_keys:] == -7.0).all()


@pytest.mark.parametrize("table", [[0, 9, 99], [-50, 2, 3], [3, 0, 0], [0, 0, 0], [2**31 - 1, -1, 2**30]])
def test_a_broken_table_reads_keys_of_the_shards_alone(table):
    """A table on the device is not looked at beforehand: whatever it holds, no address outside the shards is made."""
    _, shards = shards_of([4, 2], 2, 1)
    memory = torch.full((4096,), 255, dtype=torch.uint8, device=DEVICE)
    inside = memory[1024 : 1024 + shards.packed.numel()].view_as(shards.packed)
    inside.copy_(shards.packed)
    broken = torch.tensor(table, dtype=torch.int32, device=DEVICE)
    known = rows_of(gather_keys(shards))
    at = torch.tensor([0, 5, -3, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    for found in (
        gather_keys(KeyShards(inside, broken, DIM, 1), backend="triton"),
        pick_keys(KeyShards(inside, broken, DIM, 1), at, backend="triton"),
    ):
        assert {tuple(values) for values, _ in rows_of(found)} <= {tuple(values) for values, _ in known}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"backend": "cuda"}, ConfigError, "built for torch, triton", id="no-such-backend"),
        pytest.param({"interleave": 0}, PlanError, "interleave=0", id="no-interleave"),
        pytest.param({"interleave": 2**31}, PlanError, "interleave=2147483648", id="more-than-int32-counts"),
        pytest.param({"local_start": torch.tensor([0, 2], device=DEVICE)}, PlanError, "int32", id="int64-table"),
        pytest.param(
            {"local_start": torch.tensor([0], dtype=torch.int32, device=DEVICE)},
            PlanError,
            "num_regions=0",
            id="no-region",
        ),
        pytest.param({"dim": 6}, PlanError, "multiple of 4", id="no-whole-words"),
        pytest.param({"dim": 16}, PlanError, "whole keys of 20 bytes", id="no-whole-keys"),
        pytest.param(
            {"packed": torch.zeros(2, 48, dtype=torch.uint8, device=DEVICE)[:, :24]},
            PlanError,
            r"strides \(48, 1\)",
            id="ranks-apart",
        ),
        pytest.param(
            {"packed": torch.zeros(56, dtype=torch.uint8, device=DEVICE)[8:].view(2, 24)},
            PlanError,
            "starts at byte 8 of 16",
            id="not-aligned",
        ),
    ],
)
def test_refusals(change, error, words):
    parts = {
        "packed": torch.zeros(2, 24, dtype=torch.uint8, device=DEVICE),
        "local_start": torch.tensor([0, 2], dtype=torch.int32, device=DEVICE),
        "dim": 8,
        "interleave": 1,
    } | change
    backend = parts.pop("backend", "torch")
    with pytest.raises(error, match=words):
        gather_keys(KeyShards(**parts), backend=backend)


def test_positions_that_cannot_be_picked():
    _, shards = shards_of([0], 2, 1)
    with pytest.raises(PlanError, match="positions among no keys"):
        pick_keys(shards, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    with pytest.raises(PlanError, match="positions is int64"):
        pick_keys(shards, torch.zeros(1, dtype=torch.int64, device=DEVICE))


def test_a_workspace_of_2_31_keys_is_refused():
    start = starts([1], DEVICE)
    with pytest.raises(PlanError, match=r"less than 2\^31 keys"):
        check_regions(start, 2**30, 2, 1, start.device)
    check_regions(start, 2**30 - 512, 2, 1, start.device)
