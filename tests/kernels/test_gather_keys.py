"""Gathered keys back in token order, against keys dealt out one by one that tell which they are."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.gather_keys import check_regions, gather_keys, keys_out, packed_bytes, pull_keys, split_planes
from tests import oracles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")
DIM = 8


def starts(shards):
    return torch.tensor([0, *itertools.accumulate(shards)], dtype=torch.int32, device=DEVICE)


def name_of(region, key):
    """Bytes and scale of one key; no byte is 255, which marks what nobody wrote."""
    number = 1 + region * 900 + key
    return [number % 251, number // 251 % 251, *([number % 7] * (DIM - 2))], float(number)


def shards_of(lens, dcp_size, interleave):
    """Padded shards of each region, and what each rank sends, padding full of NaN."""
    hands = [oracles.deal(length, dcp_size, interleave) for length in lens]
    shards = [max(map(len, held)) for held in hands]
    packed = torch.full((dcp_size, packed_bytes(sum(shards), DIM)), 255, dtype=torch.uint8)
    values, scales = split_planes(packed, sum(shards), DIM)
    at = 0
    for region, (held, shard) in enumerate(zip(hands, shards, strict=True)):
        for rank, hand in enumerate(held):
            for index, key in enumerate(hand):
                row, scale = name_of(region, key)
                values.view(torch.uint8)[rank, at + index] = torch.tensor(row, dtype=torch.uint8)
                scales[rank, at + index] = scale
        at += shard
    return shards, packed.to(DEVICE)


def check(found, lens, shards, dcp_size):
    values, scales = found[0].view(torch.uint8).tolist(), found[1].tolist()
    assert len(values) == len(scales) == dcp_size * sum(shards)
    at = 0
    for region, (length, shard) in enumerate(zip(lens, shards, strict=True)):
        for key in range(length):
            assert (values[at + key], scales[at + key]) == name_of(region, key), (region, key)
        at += shard * dcp_size


def gathered(packed, shards, interleave, backend, out=None):
    values, scales = split_planes(packed, sum(shards), DIM)
    return gather_keys(values, scales, starts(shards), interleave=interleave, backend=backend, out=out)


def pulled(packed, shards, interleave):
    """Each rank's buffer by its address alone, as memory of another GPU is read."""
    buffers = [row.clone() for row in packed]
    peers = torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)
    out = keys_out(None, len(packed) * sum(shards), DIM, packed.device)
    return pull_keys(peers, starts(shards), sum(shards), DIM, interleave=interleave, out=out)


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
    shards, packed = shards_of(lens, dcp_size, interleave)
    if backend == "pull":
        found = pulled(packed, shards, interleave)
    else:
        found = gathered(packed, shards, interleave, backend)
    check(found, lens, shards, dcp_size)


@settings(max_examples=15)
@given(
    lens=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    dcp_size=st.integers(1, 5),
    interleave=st.integers(1, 5),
)
def test_the_kernel_is_the_materialised_index(lens, dcp_size, interleave):
    """Padding included, in which a place repeats a key of its region."""
    shards, packed = shards_of(lens, dcp_size, interleave)
    packed.random_(0, 255)
    want = gathered(packed, shards, interleave, "torch")
    for found in (gathered(packed, shards, interleave, "triton"), pulled(packed, shards, interleave)):
        assert torch.equal(found[0].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(found[1].view(torch.int32), want[1].view(torch.int32))


@pytest.mark.parametrize(("extra", "dim"), [(0, 128), (2, 8), (3, 12)])
def test_ranks_that_lie_apart_and_strides_of_any_unit(extra, dim):
    """Strides of 16, 8 and 4 bytes, and rows that fill no power of two."""
    wide = torch.randint(0, 120, (2, 3 * dim + 4 * extra), dtype=torch.uint8, device=DEVICE)
    values = wide[:, : 3 * dim].view(torch.float8_e4m3fn).unflatten(1, (3, dim))
    scales = torch.arange(10.0, device=DEVICE).view(2, 5)[:, 1:4]
    got = gather_keys(values, scales, starts([3]), interleave=2, backend="triton")
    owner, row = [0, 0, 1, 1, 0, 0], [0, 1, 0, 1, 2, 2]  # the last place is none of a key, and repeats one
    assert got[0].view(torch.uint8).tolist() == values.view(torch.uint8)[owner, row].tolist()
    assert got[1].tolist() == scales[owner, row].tolist()


def test_nothing_behind_the_result_is_written():
    shards, packed = shards_of([5, 3], 2, 1)
    num_keys = 2 * sum(shards)
    room = torch.full((num_keys + 64, DIM), 255, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((num_keys + 64,), -7.0, device=DEVICE)
    out = room[:num_keys].view(torch.float8_e4m3fn), scales[:num_keys]
    check(gathered(packed, shards, 1, "triton", out), [5, 3], shards, 2)
    assert (room[num_keys:] == 255).all() and (scales[num_keys:] == -7.0).all()


@pytest.mark.parametrize("table", [[0, 9, 99], [-50, 2, 3], [3, 0, 0], [0, 0, 0], [2**31 - 1, -1, 2**30]])
def test_a_broken_table_reads_keys_of_the_shards_alone(table):
    """A table on the device is not looked at beforehand: whatever it holds, no address outside the shards is made."""
    _, packed = shards_of([4, 2], 2, 1)
    values, scales = split_planes(packed, 3, DIM)
    memory = torch.full((2, 40, DIM), 255, dtype=torch.uint8, device=DEVICE)
    memory[:, 10:13] = values.view(torch.uint8)
    inside = memory.view(torch.float8_e4m3fn)[:, 10:13]
    broken = torch.tensor(table, dtype=torch.int32, device=DEVICE)
    found, _ = gather_keys(inside, scales, broken, interleave=1, backend="triton")
    known = values.view(torch.uint8).flatten(0, 1).tolist()
    assert all(row in known for row in found.view(torch.uint8).tolist())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"backend": "cuda"}, ConfigError, "built for torch, triton", id="no-such-backend"),
        pytest.param({"interleave": 0}, PlanError, "interleave=0", id="no-interleave"),
        pytest.param({"local_start": torch.tensor([0, 2], device=DEVICE)}, PlanError, "int32", id="int64-table"),
        pytest.param(
            {"local_start": torch.tensor([0], dtype=torch.int32, device=DEVICE)},
            PlanError,
            "num_regions=0",
            id="no-region",
        ),
        pytest.param({"scales": torch.zeros(2, 3, device=DEVICE)}, PlanError, "scales", id="scales-of-other-keys"),
        pytest.param({"values": torch.zeros(2, 2, 8, device=DEVICE)}, PlanError, "float8_e4m3fn", id="not-quantized"),
        pytest.param(
            {"values": torch.zeros(2, 2, 6, device=DEVICE).to(torch.float8_e4m3fn)},
            PlanError,
            "multiple of 4",
            id="no-whole-words",
        ),
        pytest.param(
            {"values": torch.zeros(2, 2, 16, device=DEVICE).to(torch.float8_e4m3fn)[:, :, :8]},
            PlanError,
            "side by side, 8 apart",
            id="keys-apart",
        ),
        pytest.param(
            {"values": torch.zeros(41, device=DEVICE).to(torch.float8_e4m3fn)[9:].view(2, 2, 8), "backend": "triton"},
            PlanError,
            "starts at byte 9 of 16",
            id="not-aligned",
        ),
    ],
)
def test_refusals(change, error, words):
    call = {
        "values": torch.zeros(2, 2, 8, device=DEVICE).to(torch.float8_e4m3fn),
        "scales": torch.zeros(2, 2, device=DEVICE),
        "local_start": torch.tensor([0, 2], dtype=torch.int32, device=DEVICE),
        "interleave": 1,
    } | change
    with pytest.raises(error, match=words):
        gather_keys(call.pop("values"), call.pop("scales"), call.pop("local_start"), **call)


def test_a_workspace_of_2_31_keys_is_refused():
    start = starts([1])
    with pytest.raises(PlanError, match=r"less than 2\^31 keys"):
        check_regions(start, 2**30, 2, 1, start.device)
    check_regions(start, 2**30 - 512, 2, 1, start.device)
