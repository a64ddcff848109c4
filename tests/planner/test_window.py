"""Sliding windows against a look at every key; gather lengths and workspace chunks against plain walks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.errors import PlanError
from cpkit.planner.slots import token_positions
from cpkit.planner.window import (
    Windows,
    WorkspaceChunk,
    causal_windows,
    draft_block_windows,
    draft_index_width,
    prefill_gather_lens,
    window_slots,
    workspace_chunks,
)
from tests import oracles


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 35)), min_size=1, max_size=3),
    window_size=st.integers(1, 12),
    block_size=st.integers(1, 7),
    bounded=st.booleans(),
    extra_width=st.integers(0, 2),
)
def test_causal_windows(rows, window_size, block_size, bounded, extra_width):
    seq_lens, query_lens = [max(a, b) for a, b, _ in rows], [min(a, b) for a, b, _ in rows]
    first = [start for *_, start in rows]
    tables = np.arange(1, 1 + 30 * len(rows), dtype=np.int32).reshape(len(rows), 30)
    req, pos = token_positions(np.array(seq_lens), np.array(query_lens))
    replay_start = np.array(first)[req] if bounded else None
    width = window_size + extra_width
    windows = causal_windows(pos, window_size=window_size, replay_start=replay_start)
    slots, lens = window_slots(windows, req, tables, block_size=block_size, width=width)
    for token, (r, p) in enumerate(zip(req.tolist(), pos.tolist(), strict=True)):
        seen = oracles.window_positions(p, window_size, first[r] if bounded else 0)
        expected = [oracles.block_slot(tables[r].tolist(), key, block_size) for key in seen]
        assert lens[token] == len(seen)
        assert slots[token].tolist() == expected + [-1] * (width - len(seen))


@settings(max_examples=40)
@given(rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=4), window=st.integers(0, 6))
def test_draft_block_sees_the_window_before_it_and_itself(rows, window):
    windows = draft_block_windows(
        np.array([prefix + query for prefix, query in rows]), np.array([q for _, q in rows]), window_size=window
    )
    for (prefix, query), start, stop in zip(rows, *(part.tolist() for part in windows), strict=True):
        before = [key for key in range(prefix) if prefix - key <= window]
        assert list(range(start, stop)) == before + list(range(prefix, prefix + query))


@pytest.mark.parametrize(
    ("position", "start", "stop"),
    [pytest.param(70, 0, 71, id="b111-inside-the-first-window"), (127, 0, 128), (128, 1, 129)],
)
def test_the_window_counts_the_querys_own_token(position, start, stop):
    windows = causal_windows(np.array([position]), window_size=128)
    assert (windows.start.item(), windows.stop.item()) == (start, stop)


def test_tokens_without_a_slot_see_nothing():
    windows = causal_windows(np.array([4, 900]), window_size=2)
    valid = np.array([True, False])
    slots, lens = window_slots(
        windows, np.array([0, 0]), np.array([[5, 3]], np.int32), block_size=4, width=3, valid=valid
    )
    assert slots.tolist() == [[23, 12, -1], [-1, -1, -1]]
    assert lens.tolist() == [2, 0]


def test_no_tokens_have_no_windows():
    none = np.zeros(0, np.int64)
    slots, lens = window_slots(Windows(none, none), none, np.zeros((0, 2), np.int32), block_size=4, width=3)
    assert slots.shape == (0, 3)
    assert lens.shape == (0,)


@pytest.mark.parametrize(
    ("width", "words"),
    [
        pytest.param(2, "token 0 sees 3 keys and an index row holds 2", id="row-too-narrow"),
        pytest.param(3, "request 0: position 8 needs entry 2 of a block table that is 2 wide", id="table-too-narrow"),
    ],
)
def test_window_refusals(width, words):
    windows = causal_windows(np.array([8]), window_size=3)
    with pytest.raises(PlanError, match=words):
        window_slots(windows, np.array([0]), np.array([[5, 3]], np.int32), block_size=4, width=width)


@settings(max_examples=40)
@given(
    prefix=st.integers(0, 20),
    query=st.integers(1, 8),
    window=st.integers(1, 9),
    replay_start=st.integers(0, 25) | st.none(),
)
def test_gathered_keys_are_those_some_query_sees(prefix, query, window, replay_start):
    seen = set()
    for pos in range(prefix, prefix + query):
        seen.update(oracles.window_positions(pos, window))
    if replay_start is not None:
        seen = {key for key in seen if key >= min(replay_start, prefix)}
    start = None if replay_start is None else np.array([replay_start])
    lens = prefill_gather_lens(np.array([prefix + query]), np.array([query]), window_size=window, replay_start=start)
    assert lens.tolist() == [len(seen)]


@pytest.mark.parametrize(
    ("window_size", "drafts", "width"),
    [(0, 0, 0), (-3, -1, 0), (1, 0, 64), (60, 4, 64), (60, 5, 128), (128, 64, 192)],
)
def test_draft_index_width(window_size, drafts, width):
    assert draft_index_width(window_size, drafts) == width


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=7),
    window=st.integers(1, 8),
    ratio=st.sampled_from([None, 1, 4]),
    chunk_size=st.integers(1, 3),
)
def test_chunks_are_the_longest_that_fit(rows, window, ratio, chunk_size):
    keys = [(prefix + query) // ratio if ratio else 0 for prefix, query in rows]
    gathered = [query + min(prefix, window - 1) for prefix, query in rows]
    area = chunk_size * ((-(-80 // ratio) if ratio else 0) + window + 20)

    def chunk(start, stop):
        return WorkspaceChunk(start, stop, max(keys[start:stop]), max(keys[start:stop]) + max(gathered[start:stop]))

    expected, start = [], 0
    while start < len(rows):
        fitting = [n for n in range(1, len(rows) - start + 1) if n * chunk(start, start + n).max_keys <= area]
        longest = 1
        while longest + 1 in fitting:
            longest += 1
        expected.append(chunk(start, start + longest))
        start += longest
    chunks = workspace_chunks(
        np.array([prefix + query for prefix, query in rows], np.int64),
        np.array([query for _, query in rows], np.int64),
        window_size=window,
        chunk_size=chunk_size,
        max_model_len=80,
        max_num_batched_tokens=20,
        compress_ratio=ratio,
    )
    assert chunks == expected
