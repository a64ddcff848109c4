"""Local lengths, token rows, gather lengths, deinterleaving: each against things dealt out one by one."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.kernels.dcp_local_lens import dcp_local_lens, join_position, split_position
from cpkit.kernels.deinterleave import deinterleave_idx
from cpkit.kernels.gather_lens import gather_lens
from cpkit.kernels.tail_slots import tail_slots
from cpkit.kernels.token_to_req import token_to_req
from tests import oracles
from tests.kernels.tensors import i32

both_backends = pytest.mark.parametrize("backend", ["torch", "triton"])
WORLDS = [pytest.param(1, 1, id="no-dcp"), pytest.param(4, 8, id="block"), pytest.param(3, 5, id="odd")]


@both_backends
@pytest.mark.parametrize(("dcp_size", "interleave"), WORLDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dcp_local_lens(backend, dcp_size, interleave, dtype):
    lens = torch.tensor([[0, 1, 7], [8, 9, 200]], dtype=dtype)
    for rank in range(dcp_size):
        out = torch.full_like(lens, -99)
        shard = {"dcp_size": dcp_size, "dcp_rank": rank, "interleave": interleave}
        dcp_local_lens(lens, **shard, out=out, backend=backend)
        want = [[len(oracles.deal(n, dcp_size, interleave)[rank]) for n in row] for row in lens.tolist()]
        assert out.tolist() == want and out.dtype == dtype
    same = torch.tensor([16_000_000_001])
    dcp_local_lens(same, dcp_size=2, dcp_rank=0, interleave=1, out=same, backend=backend)
    assert same.tolist() == [8_000_000_001]


@both_backends
@pytest.mark.parametrize("shape", [(3, 0), (2, 3), (2, 2, 3)], ids=["no-columns", "rows", "rows-of-rows"])
def test_dcp_local_lens_in_a_wider_buffer(backend, shape):
    wide, width = torch.full((*shape[:-1], 5), -99, dtype=torch.int32), shape[-1]
    lens = torch.arange(wide.numel(), dtype=torch.int32).view(wide.shape)
    dcp_local_lens(lens[..., :width], dcp_size=2, dcp_rank=1, interleave=1, out=wide[..., :width], backend=backend)
    assert wide[..., :width].tolist() == (lens[..., :width] // 2).tolist()
    assert (wide[..., width:] == -99).all()


@pytest.mark.parametrize(("dcp_size", "interleave"), WORLDS)
def test_positions_to_their_owners_and_back(dcp_size, interleave):
    owner, local = split_position(torch.arange(200), dcp_size, interleave)
    for rank, hand in enumerate(oracles.deal(200, dcp_size, interleave)):
        assert (owner == rank).nonzero()[:, 0].tolist() == hand
        assert local[hand].tolist() == list(range(len(hand)))
        assert join_position(rank, torch.arange(len(hand)), dcp_size, interleave).tolist() == hand


def test_dcp_local_lens_refusals():
    with pytest.raises(PlanError, match=r"dcp_rank=2 is not in 0\.\.1"):
        dcp_local_lens(i32([1]), dcp_size=2, dcp_rank=2, interleave=1, out=i32([0]))
    with pytest.raises(PlanError, match=r"out is int64 \[1\] on cpu: it must be int32 \[1\]"):
        dcp_local_lens(i32([1]), dcp_size=1, dcp_rank=0, interleave=1, out=torch.zeros(1, dtype=torch.int64))


@both_backends
@pytest.mark.parametrize(
    ("boundaries", "num_mapped", "rows"),
    [
        pytest.param([0, 3, 3, 5], 5, [0, 0, 0, 2, 2, 0, 0], id="empty-row-and-padding"),
        pytest.param([0, 1, 3], 5, [0, 1, 1, 1, 1, 0, 0], id="device-behind-host"),
        pytest.param([0, 0], 0, [0, 0], id="no-tokens"),
        pytest.param([0], 0, [0, 0], id="no-rows"),
        pytest.param([0, 2], 9, [0, 0], id="mapped-beyond-the-end"),
        pytest.param([0, 0, 1], 1, [1], id="empty-first-row"),
        pytest.param([0, 1], 1, [], id="nothing-asked"),
        pytest.param(range(9), 8, range(8), id="eight-rows"),
        pytest.param(range(10), 9, [*range(9), 0], id="nine-rows"),
        pytest.param([0, *[255] * 5, 256, 258], 258, [0] * 255 + [5, 6, 6], id="across-a-block"),
    ],
)
def test_token_to_req(backend, boundaries, num_mapped, rows):
    rows = list(rows)
    out = torch.full((len(rows),), -99, dtype=torch.int32)
    token_to_req(i32(boundaries), num_mapped=num_mapped, out=out, backend=backend)
    assert out.tolist() == rows


def test_tokens_without_rows_are_refused():
    with pytest.raises(PlanError, match="2 tokens and no rows"):
        token_to_req(i32([0]), num_mapped=2, out=i32([0, 0]))


@both_backends
@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
    window=st.integers(1, 6),
    first=st.none() | st.integers(0, 12),
)
def test_gather_lens_cover_every_window(backend, rows, window, first):
    loc = np.cumsum([0, *(new for _, new, _ in rows)])
    lens = [before + 1 + (new - 1) * stride for before, new, stride in rows]
    out = torch.full((len(rows),), -99, dtype=torch.int32)
    replay = None if first is None else i32([min(first, before) for before, *_ in rows])
    stride = i32([r[2] for r in rows])
    gather_lens(
        i32(loc), i32(lens), window_size=window, replay_start=replay, row_stride=stride, out=out, backend=backend
    )
    for (before, new, stride), found in zip(rows, out.tolist(), strict=True):
        start = 0 if first is None else min(first, before)
        own = [before + at * stride for at in range(new)]
        seen = {key for pos in own for key in oracles.window_positions(pos, window, start)}
        assert found == own[-1] + 1 - min(seen)


@both_backends
@pytest.mark.parametrize(
    ("new", "before", "first", "stride", "keys"),
    [
        pytest.param(2, 5, 6, 1, 2, id="replay-inside-the-queries"),
        pytest.param(2, 5, 5, 1, 2, id="replay-at-the-queries"),
        pytest.param(2, 5, 4, 1, 3, id="replay-one-before"),
        pytest.param(0, 5, 0, 3, 2, id="no-queries"),
        pytest.param(3, 5, 0, 3, 9, id="strided"),
    ],
)
def test_gather_lens_at_the_edges(backend, new, before, first, stride, keys):
    seq_len = before + (1 + (new - 1) * stride if new else 0)
    out = i32([-99])
    rows = i32([0, new]), i32([seq_len])
    options = {"replay_start": i32([first]), "row_stride": i32([stride])}
    gather_lens(*rows, window_size=3, **options, out=out, backend=backend)
    assert out.item() == keys


@both_backends
@pytest.mark.parametrize("num_rows", [0, 127, 128, 129])
def test_gather_lens_of_neighbours(backend, num_rows):
    out = torch.full((num_rows,), -99, dtype=torch.int32)
    loc, lens = i32(np.arange(7, 8 + num_rows)), i32(1 + np.arange(num_rows) % 5)  # a slice of rows: loc starts above 0
    gather_lens(loc, lens, window_size=3, out=out, backend=backend)
    assert out.tolist() == [min(1 + row % 5, 3) for row in range(num_rows)]


@both_backends
@settings(max_examples=40)
@given(
    shards=st.lists(st.integers(1, 9), min_size=1, max_size=4), dcp_size=st.integers(1, 4), interleave=st.integers(1, 4)
)
def test_deinterleaving_restores_token_order(backend, shards, dcp_size, interleave):
    sent = []
    for rank in range(dcp_size):
        for region, width in enumerate(shards):
            held = oracles.deal(width * dcp_size * interleave, dcp_size, interleave)[rank][:width]
            sent += [(region, key) for key in held]
    out = torch.full((dcp_size * sum(shards),), -99)
    start = torch.tensor([0, *itertools.accumulate(shards)])
    deinterleave_idx(start, dcp_size=dcp_size, interleave=interleave, out=out, backend=backend)
    at = 0
    for region, width in enumerate(shards):
        for key in range(width * dcp_size):
            found = sent[out[at]]
            assert found[0] == region  # behind the last key a place may repeat, inside its region
            assert found == (region, key) or (region, key) not in sent
            at += 1


@both_backends
def test_deinterleaving_skips_requests_without_keys(backend):
    out = torch.full((1026,), -99)
    deinterleave_idx(torch.tensor([0, 0, 256, 256, 513, 513]), dcp_size=2, interleave=1, out=out, backend=backend)
    want = [start + key // 2 + key % 2 * 513 for start, width in ((0, 512), (256, 514)) for key in range(width)]
    assert out.tolist() == want
    deinterleave_idx(torch.tensor([0, 0]), dcp_size=2, interleave=1, out=out[:0], backend=backend)


@both_backends
def test_tail_slots_never_write_behind_the_tokens(backend):
    slots = torch.tensor([9, 9, 9, 9, -7, 55])
    positions = torch.tensor([6, -1, 3, 2**40 + 1, 8, 8])
    wide = i32([[5, 1], [0, 1], [2**31 - 1, 1]])
    batch = slots, positions, i32([0, 2, 3, 3]), wide[:, :1]
    out = torch.full((6,), -99)
    tail_slots(*batch, kpool=4, num_tokens=4, out=out, backend=backend)  # the last token belongs to the last row
    assert out.tolist() == [22, -1, -1, (2**31 - 1) * 4 + 1, -7, 55]
    tail_slots(*batch, kpool=4, num_tokens=0, out=out, backend=backend)
    assert out.tolist() == slots.tolist()
