"""Logits of keys as the DCP ranks sent them, against a plain count per position and against the same keys in order."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.kernels.gather_keys import gather_keys
from cpkit.kernels.indexer_topk import indexer_topk
from cpkit.kernels.key_shards import KeyShards
from cpkit.kernels.mqa_logits import mqa_logits, mqa_logits_reference
from tests.kernels.gathered import gathered_bytes, starts
from tests.kernels.pages import e4m3_byte

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
EDGES = [0, 1, 31, 32, 33, 63, 64, 65]
CODES = [e4m3_byte(value) for value in (-2, -1, 0, 1, 2)]


def value(request, position, at):
    """One of the five small numbers that a key is made of."""
    return (request * 3 + position * 5 + at * (1 + position % 3)) % 5 - 2


def scale(request, position):
    return 2.0 ** ((request + position) % 4 - 2)


def key_of(request, position):
    return [CODES[value(request, position, at) + 2] for at in range(128)], scale(request, position)


def queries(M, H, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (M, H, 128), generator=generator).float()
    weights = torch.randint(-4, 5, (M, H), generator=generator) / 4
    return q.to(FP8).to(DEVICE), weights.to(DEVICE)


def counted(q, weights, request, position):
    key = [value(request, position, at) for at in range(128)]
    products = q.float().cpu() @ torch.tensor(key, dtype=torch.float32)
    return float((products.clamp(min=0) * weights.cpu()).sum()) * scale(request, position)


def shards_of(lens, dcp_size, interleave):
    held, packed = gathered_bytes(lens, dcp_size, interleave, 128, key_of)
    return held, KeyShards(packed.to(DEVICE), starts(held, DEVICE), 128, interleave)


def bounds(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def row_ranges(lens, held, dcp_size):
    """Rows of each request with keys: all of them, one, and some that begin inside; with the region they start in."""
    rows, at = [], 0
    for request, (length, shard) in enumerate(zip(lens, held, strict=True)):
        if length:
            some = {(0, length), (length // 2, length), (length - 1, length), (0, (length + 1) // 2)}
            rows += [(request, at, first, last) for first, last in sorted(some)]
        at += shard * dcp_size
    return rows


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("dcp_size", "interleave", "shard_lens"),
    [
        pytest.param(1, 1, [33, 65], id="one-rank"),
        pytest.param(2, 1, EDGES, id="tokens-in-turn"),
        pytest.param(3, 3, [65, 0, 31, 1], id="odd"),
        pytest.param(2, 64, [64, 63, 0, 65], id="tiles-in-turn"),
        pytest.param(4, 64, [32, 33, 1], id="less-than-a-turn"),
    ],
)
def test_every_logit_is_that_of_its_key(dcp_size, interleave, shard_lens, backend):
    if DEVICE == "cuda" and interleave % 64 and backend == "triton":
        pytest.skip("on Hopper they are ordered first")
    # the last key of each request is rank 0's: the others pad
    lens = [shard and (shard - 1) // interleave * interleave * (dcp_size - 1) + shard for shard in shard_lens]
    held, shards = shards_of(lens, dcp_size, interleave)
    assert held == shard_lens
    rows = row_ranges(lens, held, dcp_size)
    q, weights = queries(len(rows), 32)
    start, end = bounds(*(at + first for _, at, first, _ in rows)), bounds(*(at + last for _, at, _, last in rows))
    out = torch.full((len(rows), shards.num_keys + 3), 77.0, device=DEVICE)[:, : shards.num_keys]
    mqa_logits(q, shards, weights, start, end, out=out, backend=backend)
    for m, (request, at, first, last) in enumerate(rows):
        want = [counted(q[m], weights[m], request, position) for position in {first, (first + last) // 2, last - 1}]
        got = [float(out[m, at + position]) for position in {first, (first + last) // 2, last - 1}]
        assert got == want, (request, first, last)
        assert int((out[m] != 77.0).sum()) <= last - first
        assert (out[m, : at + first] == 77.0).all() and (out[m, at + last :] == 77.0).all()
    assert out.as_strided((len(rows), 3), (shards.num_keys + 3, 1), shards.num_keys).eq(77.0).all()
    ordered = mqa_logits(q, gather_keys(shards), weights, start, end, outside="-inf", backend=backend)
    assert torch.equal(mqa_logits(q, shards, weights, start, end, outside="-inf", backend=backend), ordered)


@settings(max_examples=8, deadline=None)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=3).filter(lambda lens: sum(lens) > 130),
    dcp_size=st.integers(1, 4),
    interleave=st.sampled_from([64, 128] if DEVICE == "cuda" else [1, 3, 64]),
    seed=st.integers(0, 99),
)
def test_shards_score_as_their_keys_in_order(lens, dcp_size, interleave, seed):
    """Random queries, so equal to the bit says the same keys in the same order of sums; padding is NaN."""
    held, shards = shards_of(lens, dcp_size, interleave)
    assume(shards.is_aligned)
    generator = torch.Generator().manual_seed(seed)
    rows = row_ranges(lens, held, dcp_size)
    q = torch.randn(len(rows), 64, 128, generator=generator).to(FP8).to(DEVICE)
    weights = torch.randn(len(rows), 64, generator=generator).to(DEVICE)
    start, end = bounds(*(at + first for _, at, first, _ in rows)), bounds(*(at + last for _, at, _, last in rows))
    found, want = (mqa_logits(q, keys, weights, start, end, outside="-inf") for keys in (shards, gather_keys(shards)))
    assert torch.equal(found, want) and not found.isnan().any()


def test_shards_without_keys_have_no_logits():
    _, shards = shards_of([0, 0], 3, 64)
    q, weights = queries(2, 32)
    assert mqa_logits(q, shards, weights, bounds(0, 0), bounds(0, 0)).shape == (2, 0)


def test_shards_that_the_kernel_cannot_read_are_refused():
    _, few = shards_of([20], 2, 1)
    q, weights = queries(1, 32)
    with pytest.raises(PlanError, match=r"shards of 10 keys, interleave 1: .* call gather_keys first"):
        mqa_logits(q, few, weights, bounds(0), bounds(20))
    in_order = mqa_logits(q, gather_keys(few), weights, bounds(0), bounds(20), backend="torch")
    assert mqa_logits(q, few, weights, bounds(0), bounds(20), backend="torch").tolist() == in_order.tolist()
    assert mqa_logits_reference(q, few, weights, bounds(0), bounds(20)).tolist() == in_order.tolist()
    narrow = KeyShards(torch.zeros(2, 68 * 70, dtype=torch.uint8, device=DEVICE), starts([70], DEVICE), 64, 64)
    with pytest.raises(PlanError, match=r"keys of 64 values .* for q of 128 values"):
        mqa_logits(q, narrow, weights, bounds(0), bounds(140))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("shape", "dim", "words"),
    [
        pytest.param((2 * 40 * 132,), 128, r"packed is uint8 \[10560\] .* must be uint8 \[any, any\]", id="no-ranks"),
        pytest.param((2, 40 * 132), -4, "keys of -4 values: dim must be a multiple of 4", id="negative-dim"),
        pytest.param((2, 40 * 132 - 4), 128, "whole keys of 132 bytes", id="part-of-a-key"),
    ],
)
def test_broken_shards_are_refused_whoever_reads_them(shape, dim, words, backend):
    broken = KeyShards(torch.zeros(shape, dtype=torch.uint8, device=DEVICE), starts([40], DEVICE), dim, 64)
    q, weights = queries(1, 32)
    with pytest.raises(PlanError, match=words):
        mqa_logits(q, broken, weights, bounds(0), bounds(80), backend=backend)
    with pytest.raises(PlanError, match=words):
        indexer_topk(q, broken, weights, bounds(0), bounds(80), 512, backend=backend)
