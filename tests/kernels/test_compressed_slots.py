"""Compressed slots on every rank against states appended in turn; packed slots through a gather."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.compressed_slots import (
    StateBlocks,
    compressed_slots,
    packed_compressed_slots,
    unpack_compressed_slots,
)
from cpkit.kernels.token_to_req import BatchRows
from cpkit.topology import Shard
from tests import oracles
from tests.kernels.tensors import garbage, i32

both_backends = pytest.mark.parametrize("backend", ["torch", "triton"])
ALONE = Shard()
REQS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=4)


@both_backends
@settings(max_examples=30)
@given(
    reqs=REQS,
    dcp_size=st.integers(1, 3),
    turn=st.integers(1, 2),
    ratio=st.sampled_from([1, 2, 4]),
    states_per_block=st.sampled_from([1, 2, 3]),
    padding=st.integers(0, 2),
    hidden=st.sets(st.integers(0, 12), max_size=4),
)
def test_states_of_every_rank(backend, reqs, dcp_size, turn, ratio, states_per_block, padding, hidden):
    seq_lens, query_lens = [before + new for before, new in reqs], [new for _, new in reqs]
    total, tables = sum(query_lens), 1 + np.arange(24 * len(reqs)).reshape(-1, 24)
    written = [at not in hidden for at in range(total)]
    rows = BatchRows(i32(np.cumsum([0, *query_lens])), i32(seq_lens))
    states, interleave = StateBlocks(i32(tables), ratio, states_per_block), turn * ratio
    shards = [Shard(dcp_size=dcp_size, dcp_rank=rank, interleave=interleave) for rank in range(dcp_size)]
    want = oracles.state_slots(
        seq_lens,
        query_lens,
        tables.tolist(),
        ratio=ratio,
        states_per_block=states_per_block,
        ranks=dcp_size,
        interleave=interleave,
        written=written,
    )
    packed = garbage(total + padding + 1)
    writes = torch.tensor(written + [True] * padding, dtype=torch.bool)
    packed_compressed_slots(writes, rows, states, shards[0], out=packed, backend=backend)
    assert packed[total:].tolist() == [-1] * (padding + 1)
    for rank, shard in enumerate(shards):
        own = oracles.token_slots(seq_lens, query_lens, tables.tolist(), 24, dcp_size, interleave)[rank]
        slots = [slot if at not in hidden else -1 for at, slot in enumerate(own)] + [5] * padding
        out = garbage(total + padding + 2)
        slots = torch.tensor(slots, dtype=torch.int64)
        compressed_slots(slots, rows, states, shard, out=out, backend=backend)
        assert out.tolist() == want[rank] + [-1] * (padding + 2)
        kept = garbage(len(packed) + 1)
        unpack_compressed_slots(packed, shard, out=kept, backend=backend)
        assert kept.tolist() == want[rank] + [-1] * (padding + 2)


@both_backends
def test_strided_rows(backend):
    out = garbage(3)  # positions 1 4 7 of a request: only 1 and 7 end a state of 2 tokens
    slots = torch.zeros(3, dtype=torch.int64)
    rows = BatchRows(i32([0, 3]), i32([8]), i32([3]))
    compressed_slots(slots, rows, StateBlocks(i32([[5, 6]]), 2, 2), ALONE, out=out, backend=backend)
    assert out.tolist() == [5 * 2 + 0, -1, 6 * 2 + 1]


@both_backends
@pytest.mark.parametrize(
    ("seq_len", "table", "slots"),
    [
        pytest.param(4, [[9, 8]], [-1, 18, -1, 19], id="all-in-range"),
        pytest.param(2, [[9, 8]], [-1, -1, -1, 18], id="before-position-0"),
        pytest.param(8, [[9]], [-1, -1, -1, -1], id="behind-the-table"),
        pytest.param(4, [[0, 8]], [-1, -1, -1, -1], id="null-block"),
        pytest.param(4, [[-1, -7]], [-1, -1, -1, -1], id="negative-blocks"),
        pytest.param(4, np.zeros((1, 0)), [-1, -1, -1, -1], id="no-table"),
        pytest.param(-(2**31), [[9, 8]], [-1, -1, -1, -1], id="garbage-length"),
        pytest.param(2**31 - 1, [[9, 8]], [-1, -1, -1, -1], id="longest-length"),
    ],
)
def test_nothing_is_written_where_nothing_belongs(backend, seq_len, table, slots):
    out = garbage(4)
    rows, states = BatchRows(i32([0, 4]), i32([seq_len])), StateBlocks(i32(table), 2, 2)
    compressed_slots(torch.zeros(4, dtype=torch.int64), rows, states, ALONE, out=out, backend=backend)
    assert out.tolist() == slots


@both_backends
def test_slots_beyond_int32(backend):
    out = garbage(1)
    rows, states = BatchRows(i32([0, 1]), i32([4])), StateBlocks(i32([[2**31 - 1]]), 4, 64)
    compressed_slots(torch.zeros(1, dtype=torch.int64), rows, states, ALONE, out=out, backend=backend)
    assert out.tolist() == [(2**31 - 1) * 64]
    many = Shard(dcp_size=1 << 20, interleave=4)
    packed_compressed_slots(torch.ones(1, dtype=torch.bool), rows, states, many, out=out, backend=backend)
    assert out.tolist() == [(2**31 - 1) * 64 << 20]


@both_backends
@pytest.mark.parametrize("tokens", [255, 256, 257], ids=["block-1", "block", "block+1"])
def test_tokens_around_a_block_of_the_kernel(backend, tokens):
    out = garbage(tokens + 300)  # the last token is that of a second row, behind an empty one
    rows = BatchRows(i32([0, tokens - 1, tokens - 1, tokens]), i32([tokens - 1, 0, 2]))
    states = StateBlocks(i32([[3] * 200, [4] * 200, [5] * 200]), 2, 2)
    compressed_slots(torch.zeros(tokens, dtype=torch.int64), rows, states, ALONE, out=out, backend=backend)
    first = [-1 if pos % 2 == 0 else 3 * 2 + pos // 2 % 2 for pos in range(tokens - 1)]
    assert out.tolist() == [*first, 5 * 2] + [-1] * 300


@both_backends
def test_a_view_of_a_wider_table(backend):
    wide, out = i32([[7, 99, 99], [8, 99, 99]]), garbage(4)
    rows, states = BatchRows(i32([0, 2, 4]), i32([2, 4])), StateBlocks(wide[:, :1], 1, 2)
    compressed_slots(torch.zeros(4, dtype=torch.int64), rows, states, ALONE, out=out, backend=backend)
    assert out.tolist() == [14, 15, -1, -1]  # column 1 is the next buffer's, not the table's


@both_backends
def test_no_rows_and_no_tokens(backend):
    rows, states = BatchRows(i32([0]), i32([])), StateBlocks(i32(np.zeros((0, 2))), 2, 2)
    out = garbage(2)
    compressed_slots(torch.zeros(2, dtype=torch.int64), rows, states, ALONE, out=out, backend=backend)
    assert out.tolist() == [-1, -1]
    compressed_slots(torch.zeros(0, dtype=torch.int64), rows, states, ALONE, out=garbage(0), backend=backend)
    unpack_compressed_slots(garbage(0), Shard(dcp_size=2), out=out, backend=backend)
    assert out.tolist() == [-1, -1]


def test_refusals():
    table = i32([[3]])
    batch = BatchRows(i32([0, 1]), i32([4])), StateBlocks(table, 4, 2)
    with pytest.raises(PlanError, match="slot_mapping is int32"):
        compressed_slots(i32([0]), *batch, ALONE, out=garbage(1))
    with pytest.raises(PlanError, match="out is int32"):
        compressed_slots(torch.zeros(1, dtype=torch.int64), *batch, ALONE, out=i32([0]))
    with pytest.raises(ConfigError, match="a buffer of 1 slots for 2 tokens"):
        compressed_slots(torch.zeros(2, dtype=torch.int64), *batch, ALONE, out=garbage(1))
    with pytest.raises(ConfigError, match="a state would span two"):
        packed_compressed_slots(torch.ones(1, dtype=bool), *batch, Shard(dcp_size=2, interleave=2), out=garbage(1))
    with pytest.raises(ConfigError, match="backend='cuda': it is built for torch, triton"):
        compressed_slots(garbage(1), *batch, ALONE, out=garbage(1), backend="cuda")
    with pytest.raises(PlanError, match="states_per_block=0"):
        compressed_slots(garbage(1), batch[0], StateBlocks(table, 4, 0), ALONE, out=garbage(1))
