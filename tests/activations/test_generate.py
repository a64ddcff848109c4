"""Generated activations against splitmix64 in Python's whole numbers, and exact data against its own bounds."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from cpkit.activations.generate import DATA_KINDS, STREAMS, Generated, check_exact_sums, splitmix64
from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.fp8 import dequantize_fp8, quantize_fp8

MASK = (1 << 64) - 1


def slow_splitmix(state, counter):
    """The published generator, run counter + 1 times from `state`."""
    for _ in range(counter + 1):
        state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow_value(seed, data, stream, layer, req, position, dim, head, place):
    state = seed
    for field in (layer, STREAMS.index(stream), req, position):
        state = slow_splitmix(state, field)
    words = math.ceil(dim / 4)
    word = slow_splitmix(state, head * words + place // 4)
    lane = word >> 16 * (place % 4) & 0xFFFF
    signed = lane - 0x10000 if lane >= 0x8000 else lane
    if data == "random":
        value = signed / (2**21 if stream == "index_weights" else 2**14)
        return value if stream == "index_weights" else torch.tensor(value).bfloat16().item()
    if stream == "index_weights":
        return (-1 if lane & 4 else 1) / 2 ** (lane & 3)
    most = 1 if stream == "query" else 7
    value = (signed + 0x8000) * (2 * most + 1) // 0x10000 - most
    if stream != "query" and place % 64 == 0:
        value = -7 if value < 0 else 7
    return value * 2.0 ** ((state >> 8 & 0xFF) % 3 - 1) if stream == "index_key" else value


def test_known_numbers_of_splitmix64():
    got = splitmix64(torch.tensor([0]), torch.arange(3))
    assert [number & MASK for number in got.tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("data", DATA_KINDS)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("seed", [0, 7, MASK], ids=["seed-0", "seed-7", "largest-seed"])
def test_each_value_follows_from_its_key(stream, data, seed):
    tokens, dim, layer = [(0, 0), (3, 1), (1, 70), (300, 17)], 67, 2
    req, position = (torch.tensor(column) for column in zip(*tokens, strict=True))
    source, heads = Generated(seed, data), range(1)
    if stream in ("query", "index_query"):
        heads = range(2, 4)
        got = source.heads(stream, layer, req, position, dim, heads)
    else:
        got = source.rows(stream, layer, req, position, dim)[:, None]
    assert got.dtype == (torch.float32 if stream == "index_weights" else torch.bfloat16)
    assert got.shape == (len(tokens), len(heads), dim)
    for (i, (r, p)), (j, head), place in itertools.product(enumerate(tokens), enumerate(heads), (0, 1, 5, 63, 64, 66)):
        assert got[i, j, place].item() == slow_value(seed, data, stream, layer, r, p, dim, head, place)


@pytest.mark.parametrize("data", DATA_KINDS)
def test_a_part_is_cut_from_the_whole(data):
    """Any tokens and any heads, in any order and tiling: a rank makes what all ranks agree on."""
    source = Generated(5, data)
    req, position = torch.zeros(3000).long(), torch.arange(3000)
    whole = source.heads("query", 0, req, position, 128, range(16))  # more than one tile
    some = torch.tensor([2999, 0, 1024, 1024])
    part = source.heads("query", 0, req[some], position[some], 128, range(4, 7))
    assert torch.equal(part, whole[some, 4:7])
    assert source.rows("hidden", 0, req[:0], position[:0], 12).shape == (0, 12)
    assert source.heads("query", 0, req, position, 8, range(0)).shape == (3000, 0, 8)


def test_other_keys_give_other_values():
    req, position = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1])
    rows = [
        row
        for source, layer, stream in itertools.product(
            (Generated(0), Generated(1)), (0, 1), ("latent", "window", "hidden")
        )
        for row in source.rows(stream, layer, req, position, 64).tolist()
    ]
    assert len({tuple(row) for row in rows}) == len(rows) == 36


def test_exact_values_are_spread_evenly():
    values = Generated(3).rows("latent", 0, torch.zeros(2000).long(), torch.arange(2000), 64)[:, 1:].flatten()
    counts = torch.bincount(values.int() + 7, minlength=15)
    assert counts.min() > 0.9 * counts.max()


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("pow2_scales", [False, True])
@pytest.mark.parametrize("stream", ["latent", "window", "index_key"])
def test_fp8_keeps_exact_vectors(stream, pow2_scales, group_size):
    rows = Generated(1).rows(stream, 0, torch.arange(50), torch.arange(50), 512)
    quantized, scales = quantize_fp8(rows, group_size=group_size, pow2_scales=pow2_scales)
    assert torch.equal(dequantize_fp8(quantized, scales), rows.float())
    assert (torch.frexp(scales).mantissa == 0.5).all()


def test_the_bounds_of_exact_data_by_hand():
    """The largest magnitudes that can occur, in exact fractions: all are whole multiples of a unit below 2^24 units."""
    dim, heads, unit = 128, 64, Fraction(1, 8)
    weights = Generated(0).rows("index_weights", 0, torch.zeros(500).long(), torch.arange(500), heads)
    assert {abs(w) for w in weights.flatten().tolist()} == {1.0, 0.5, 0.25, 0.125}
    query = Generated(0).heads("index_query", 0, torch.zeros(9).long(), torch.arange(9), dim, range(heads))
    assert query.abs().max() == 7 and torch.equal(query, query.round())
    largest = heads * dim * 7 * 7
    assert largest == 401_408 and largest / unit == 3_211_264 < 2**24
    assert 576 * 7 == 4032 and 2048 * 7 == 14_336


@pytest.mark.parametrize("seed", [0, 1])
def test_logits_of_exact_data_are_the_same_in_any_order(seed):
    """H=64, D=128: fp32 sums, forwards, backwards, in pairs and of fp8 operands, all equal the float64 one."""
    heads, dim, num_keys = 64, 128, 40
    source, req, at = Generated(seed), torch.zeros(num_keys).long(), torch.arange(num_keys)
    query = source.heads("index_query", 0, req[:1], at[:1], dim, range(heads))[0].float()
    weights = source.rows("index_weights", 0, req[:1], at[:1], heads)[0]
    keys = source.rows("index_key", 0, req, at, dim).float()
    want = (weights.double()[:, None] * (query.double() @ keys.double().T).clamp(min=0)).sum(0)

    terms = weights[:, None] * (query @ keys.T).clamp(min=0)
    forwards, backwards = torch.zeros(num_keys), torch.zeros(num_keys)
    for head in range(heads):
        forwards += terms[head]
        backwards += terms[heads - 1 - head]
    pairs = terms
    while len(pairs) > 1:
        pairs = pairs[::2] + pairs[1::2]
    q8, q_scale = quantize_fp8(query)
    k8, k_scale = quantize_fp8(keys)
    folded = weights * q_scale[:, 0]
    scaled = k_scale[:, 0] * (folded[:, None] * (q8.float() @ k8.float().T).clamp(min=0)).sum(0)
    for logits in (forwards, backwards, pairs[0], scaled):
        assert torch.equal(logits.double(), want)
    assert len(want.unique()) > 1


@pytest.mark.parametrize(("num_heads", "dim"), [(64, 128), (32, 128), (1, 42_799)])
def test_sizes_that_stay_exact(num_heads, dim):
    check_exact_sums(num_heads, dim)


def test_refusals():
    at = torch.arange(2)
    with pytest.raises(ConfigError, match="at most"):
        check_exact_sums(1, 42_800)
    with pytest.raises(ConfigError, match="512 index heads"):
        Generated().heads("index_query", 0, at, at, 128, range(512))
    with pytest.raises(ConfigError, match="'real'"):
        Generated(data="real")
    with pytest.raises(ConfigError, match="seed=-1"):
        Generated(-1)
    with pytest.raises(ConfigError, match="'query'"):
        Generated().rows("query", 0, at, at, 4)
    with pytest.raises(ConfigError, match="'latent'"):
        Generated().heads("latent", 0, at, at, 4, range(1))
    with pytest.raises(PlanError, match="position"):
        Generated().rows("latent", 0, at, at[:1], 4)
    with pytest.raises(PlanError, match="int64"):
        Generated().rows("latent", 0, at.int(), at.int(), 4)
