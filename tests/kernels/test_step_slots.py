"""All slots of a step in one launch, against states appended in turn and keys dealt out one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.compressed_slots import StateBlocks
from cpkit.kernels.step_slots import StateSlots, TailSlots, TokenSlots, step_slots
from cpkit.kernels.token_to_req import BatchRows
from cpkit.topology import Shard
from tests import oracles
from tests.kernels.tensors import GARBAGE, garbage, i32

both_backends = pytest.mark.parametrize("backend", ["torch", "triton"])
ALONE = Shard()
REQS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=4)


@both_backends
def test_the_picture(backend):
    outs = [garbage(6) for _ in range(3)]
    step_slots(
        BatchRows(i32([0, 5]), i32([5])),
        TokenSlots(i32([[7, 8, 9]]), outs[0], 2, ALONE),
        StateSlots(StateBlocks(i32([[3, 4]]), compress_ratio=2, states_per_block=2), outs[1]),
        TailSlots(i32([[5]]), outs[2], kpool=4),
        writes_kv=torch.tensor([False, True, True, True, True]),
        backend=backend,
    )
    assert [out.tolist() for out in outs] == [
        [-1, 15, 16, 17, 18, -1],
        [-1, 6, -1, 7, -1, -1],
        [20, 21, 22, 23, 20, -1],
    ]


@both_backends
@settings(max_examples=25)
@given(
    reqs=REQS,
    dcp_size=st.integers(1, 3),
    turn=st.integers(1, 2),
    ratio=st.sampled_from([1, 2, 4]),
    kinds=st.sampled_from(["token", "states", "tail", "all"]),
    hidden=st.sets(st.integers(0, 12), max_size=4),
)
def test_every_kind_on_every_rank(backend, reqs, dcp_size, turn, ratio, kinds, hidden):
    seq_lens, query_lens = [before + new for before, new in reqs], [new for _, new in reqs]
    total, tables = sum(query_lens), 1 + np.arange(24 * len(reqs)).reshape(-1, 24)
    written = [at not in hidden for at in range(total)]
    owned = oracles.token_slots(seq_lens, query_lens, tables.tolist(), 3, dcp_size, turn * ratio)
    states = oracles.state_slots(
        seq_lens,
        query_lens,
        tables.tolist(),
        ratio=ratio,
        states_per_block=2,
        ranks=dcp_size,
        interleave=turn * ratio,
        written=written,
    )
    tail = [
        table[0] * 4 + pos % 4
        for table, seq_len, new in zip(tables.tolist(), seq_lens, query_lens, strict=True)
        for pos in range(seq_len - new, seq_len)
    ]
    for rank in range(dcp_size):
        outs = {name: garbage(total + 2) for name in ("token", "states", "tail")}
        shard = Shard(dcp_size=dcp_size, dcp_rank=rank, interleave=turn * ratio)
        step_slots(
            BatchRows(i32(np.cumsum([0, *query_lens])), i32(seq_lens)),
            TokenSlots(i32(tables), outs["token"], 3, shard),
            StateSlots(StateBlocks(i32(tables), ratio, 2), outs["states"]) if kinds in ("states", "all") else None,
            TailSlots(i32(tables), outs["tail"], 4) if kinds in ("tail", "all") else None,
            writes_kv=torch.tensor(written, dtype=torch.bool) if hidden else None,
            backend=backend,
        )
        want = {
            "token": [slot if write else -1 for slot, write in zip(owned[rank], written, strict=True)],
            "states": states[rank],
            "tail": tail,
        }
        for name, out in outs.items():
            wanted = name == "token" or kinds in (name, "all")
            assert out.tolist() == (want[name] + [-1, -1] if wanted else [GARBAGE] * (total + 2)), name


@both_backends
def test_hostile_rows(backend):
    """A null block, a negative one, a length below its tokens, a table too short, a row without tokens, stripes."""
    rows = BatchRows(i32([0, 2, 4, 6, 8, 8, 10]), i32([2, 2, 1, 9, 5, 6]), i32([1, 1, 1, 1, 1, 3]))
    tables = i32([[0, 5], [-3, 5], [4, 5], [4, 5], [4, 5], [6, 7]])
    outs = [garbage(12) for _ in range(3)]
    step_slots(
        rows,
        TokenSlots(tables, outs[0], 2, ALONE),
        StateSlots(StateBlocks(tables, compress_ratio=2, states_per_block=1), outs[1]),
        TailSlots(tables, outs[2], kpool=4),
        backend=backend,
    )
    assert outs[0].tolist() == [-1, -1, -1, -1, -1, 8, -1, -1, 14, -1, -1, -1]
    assert outs[1].tolist() == [-1] * 12
    assert outs[2].tolist() == [-1, -1, -1, -1, -1, 16, 19, 16, 26, 25, -1, -1]


@both_backends
def test_no_rows_and_no_tokens(backend):
    none, out = i32(np.zeros((0, 1))), garbage(2)
    rows = BatchRows(i32([0]), i32([]))
    step_slots(rows, TokenSlots(none, out, 2, ALONE), tail=TailSlots(none, garbage(2), 4), backend=backend)
    assert out.tolist() == [-1, -1]
    rows = BatchRows(i32([0, 0]), i32([3]))
    step_slots(rows, TokenSlots(i32([[5, 6]]), garbage(0), 2, ALONE), backend=backend)


def test_refusals():
    rows, tables, out = BatchRows(i32([0, 1]), i32([4])), i32([[3]]), garbage(1)
    token, blocks = TokenSlots(tables, out, 4, ALONE), StateBlocks(tables, 4, 2)
    two = TokenSlots(tables, out, 4, Shard(dcp_size=2, interleave=2))
    with pytest.raises(ConfigError, match="a state would span two"):
        step_slots(rows, two, StateSlots(blocks, garbage(1)))
    with pytest.raises(PlanError, match=r"tail\.block_tables \[1, 0\]"):
        step_slots(rows, token, tail=TailSlots(tables[:, :0], garbage(1), 4))
    with pytest.raises(PlanError, match=r"states\.out is int64"):
        step_slots(rows, token, StateSlots(blocks, garbage(2)))
    with pytest.raises(PlanError, match="writes_kv of 2 tokens and slots for 1"):
        step_slots(rows, token, writes_kv=torch.ones(2, dtype=torch.bool))
