"""Causal work against a count of every key that every token sees."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.errors import PlanError
from cpkit.layers import Index, Layer
from cpkit.model import Model, load_model
from cpkit.planner.rows import Rows
from cpkit.planner.work import causal_work, floor_sum, layer_work, row_keys, row_window
from cpkit.step import plan_step
from cpkit.topology import Topology


def make_rows(rows):
    """Rows from (start_pos, stride, num_tokens); the fields that work does not read are left plain."""
    start, stride, count = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    last = start + stride * (count - 1)
    return Rows(
        req=np.arange(len(rows)),
        start_pos=start,
        stride=stride,
        num_tokens=count,
        seq_lens=np.where(count > 0, last + 1, 0),
        is_prefilling=np.ones(len(rows), bool),
        query_start_loc=np.cumsum([0, *count]),
        num_decodes=0,
    )


def positions(row):
    start, stride, count = row
    return range(start, start + stride * count, stride)


def count_keys(pos, ratio):
    """Keys complete once the token at `pos` is there: every ratio-th token completes one."""
    return sum(1 for token in range(pos + 1) if token % ratio == ratio - 1)


def count_recent(pos, window_size):
    return sum(1 for token in range(pos + 1) if pos - token < window_size)


ROWS = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 16), st.integers(0, 25)), min_size=1, max_size=4)


@given(rows=ROWS, ratio=st.sampled_from([1, 2, 3, 4, 16, 128]))
@example(rows=[(127, 1, 2), (126, 1, 1), (0, 1, 0)], ratio=128)
@example(rows=[(0, 16, 8), (15, 16, 8)], ratio=16)
def test_keys_of_a_row(rows, ratio):
    expected = [sum(count_keys(pos, ratio) for pos in positions(row)) for row in rows]
    assert row_keys(make_rows(rows), ratio).tolist() == expected


@given(rows=ROWS, window_size=st.sampled_from([1, 2, 7, 64, 128]))
@example(rows=[(6, 1, 1), (7, 1, 1), (5, 1, 3), (0, 7, 2), (0, 8, 2)], window_size=7)
def test_window_of_a_row(rows, window_size):
    expected = [sum(count_recent(pos, window_size) for pos in positions(row)) for row in rows]
    assert row_window(make_rows(rows), window_size).tolist() == expected


@given(
    entries=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=4),
    step=st.integers(0, 60),
    divisor=st.integers(1, 60),
)
def test_floor_sum(entries, step, divisor):
    count, start = (np.array(column) for column in zip(*entries, strict=True))
    expected = [sum((b + step * j) // divisor for j in range(n)) for n, b in entries]
    assert floor_sum(count, step, start, divisor).tolist() == expected


def kinds():
    """One layer kind a case: its layer, and how many keys the token at pos sees there."""
    index = Index(topk=8, num_heads=1, head_dim=8, ratio=4, key_bytes=8)
    pools = Index(topk=8, num_heads=1, head_dim=8, ratio=16, key_bytes=8)
    return [
        pytest.param(Layer("dsa", 1, compress_ratio=1), lambda p: p + 1, id="every-key"),
        pytest.param(Layer("dsa", 1, compress_ratio=1, index=pools), lambda p: count_keys(p, 16), id="pools-of-16"),
        pytest.param(
            Layer("c4a", 1, compress_ratio=4, index=index, window_size=5),
            lambda p: count_keys(p, 4) + count_recent(p, 5),
            id="states-and-window",
        ),
        pytest.param(Layer("swa", 1, window_size=5), lambda p: count_recent(p, 5), id="window-only"),
        pytest.param(Layer("linear", 1), lambda p: 0, id="no-keys"),
    ]


@pytest.mark.parametrize(("layer", "seen"), kinds())
def test_work_of_a_layer_kind(layer, seen):
    rows = [(0, 1, 6), (30, 3, 4), (15, 1, 1)]
    model = Model("m", "t", 8, 8, 1 << 20, (layer, layer))
    expected = sum(seen(pos) for row in rows for pos in positions(row))
    assert layer_work(make_rows(rows), model) == [expected, expected]


def test_layers_of_a_kind_count_each():
    model = Model("m", "t", 8, 8, 1 << 20, (Layer("dsa", 3, compress_ratio=1), Layer("swa", 2, window_size=2)))
    assert causal_work(make_rows([(0, 1, 3)]), model) == 3 * (1 + 2 + 3) + 2 * (1 + 2 + 2)


@pytest.mark.parametrize("strategy", ["head_tail", "head_tail_even", "contiguous", "round_robin"])
def test_work_is_the_same_however_it_is_split(strategy):
    batch = Batch.from_lens([300, 57, 7], [300, 40, 3], [300, 57, 7])
    model = load_model("deepseek-v4-flash")
    topology = Topology(pcp=4, block_size=128)
    plan = plan_step(batch, topology, model, default_budget(model), partition=strategy)
    whole = plan_step(batch, Topology(block_size=128), model, default_budget(model))
    split = sum(causal_work(rank.rows, model) for rank in plan.ranks)
    assert split == causal_work(whole.ranks[0].rows, model)


def test_head_tail_is_even_where_contiguous_is_not():
    batch = Batch.from_lens([800], [800], [800])
    model = load_model("deepseek-v3.2")
    for strategy, even in (("head_tail", True), ("contiguous", False)):
        plan = plan_step(batch, Topology(pcp=4), model, default_budget(model), partition=strategy)
        work = {causal_work(rank.rows, model) for rank in plan.ranks}
        assert (len(work) == 1) == even


# 2^32 - 1 tokens from position 0 see (2^32 - 1) * 2^31 = 2^63 - 2^31 keys; one token more is above 2^63 - 1.
@pytest.mark.parametrize("count", [pytest.param((1 << 32) - 1, id="largest-sum"), pytest.param(4, id="small")])
def test_sums_up_to_int64_are_exact(count):
    assert row_keys(make_rows([(0, 1, count)]), 1).tolist() == [count * (count + 1) // 2]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: row_keys(make_rows([(0, 1, 1 << 32)]), 1), id="one-row"),
        pytest.param(lambda: row_keys(make_rows([(0, 1, 3 << 30)] * 2), 1), id="rows-together"),
        pytest.param(lambda: row_window(make_rows([(1 << 30, 1, 1 << 40)]), 1 << 30), id="window"),
        pytest.param(
            lambda: causal_work(make_rows([(0, 1, 1 << 31)]), SimpleNamespace(layers=(Layer("dsa", 61, 1),))),
            id="layers-together",
        ),
    ],
)
def test_sums_above_int64_are_refused(call):
    with pytest.raises(PlanError, match="does not fit int64"):
        call()


def test_a_row_too_wide_for_int64_products_may_still_have_a_small_sum():
    """Positions near 2^40 with ratio 128: keys x tokens, the guess, is large; the sum is not."""
    start, count = (1 << 40) - (1 << 24), 1 << 24
    got = row_keys(make_rows([(start, 1, count)]), 128)
    assert got.tolist() == [sum(128 * state for state in range(start // 128, (start + count) // 128)) + count // 128]
