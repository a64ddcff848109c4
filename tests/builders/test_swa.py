"""Sliding-window builds against windows looked at key by key: worlds, draft blocks, updates, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.budget import Budget
from cpkit.builders.chip import Chip
from cpkit.builders.common import rank_batch
from cpkit.builders.swa import SwaBuilder, SwaConfig
from cpkit.errors import ConfigError, PlanError
from tests import oracles
from tests.builders.steps import BLOCK, steps

CHIP = Chip("cuda", family=90, num_workers=3)


def config(*, drafts=3, window=5, tokens=128, seqs=16, **options):
    budget = Budget(
        workspace_tokens=1000, max_num_batched_tokens=tokens, max_num_seqs=seqs, num_speculative_tokens=drafts
    )
    given = {"chip": CHIP, "window_size": window, "block_size": BLOCK, "num_blocks": 1000, "max_model_len": 500}
    return SwaConfig(budget, **{**given, **options})


def window_batch(step, pcp_rank, *, unwritten=(), replay=None, **fields):
    """A rank's tokens with their own slots in the replicated cache; those in `unwritten` have none."""
    rows, tokens = step.rows[pcp_rank], step.tokens(pcp_rank)
    slots = [
        -1 if at in unwritten else oracles.block_slot(step.tables[req], pos, BLOCK)
        for at, (req, pos) in enumerate(tokens)
    ]
    batch = rank_batch(
        rows.num_tokens,
        rows.seq_lens,
        step.tables[rows.req] if step.batch.num_reqs else np.zeros((1, 1), int),
        slots + [-1] * step.padding,
        **fields,
    )
    stride = torch.tensor(rows.stride.astype(np.int32))
    start = None if replay is None else torch.tensor(np.array(replay, np.int32)[rows.req % len(replay)])
    return replace(batch, row_stride=stride, replay_start=start)


@settings(max_examples=25)
@given(step=steps(dcp=(1,), ratios=(1,)), hidden=st.sets(st.integers(0, 9), max_size=3), first=st.integers(0, 12))
def test_every_token_sees_its_window(step, hidden, first):
    for pcp_rank in range(step.pcp_size):
        tokens = step.tokens(pcp_rank)
        for replay in (None, [first, 0]):
            batch = window_batch(step, pcp_rank, unwritten=hidden, replay=replay)
            built = SwaBuilder(config()).build(batch)
            decodes = built.split.num_decode_tokens
            found = list(zip(built.decode.indices.tolist(), built.decode.lens.tolist(), strict=True))
            if built.prefill is not None:
                found += zip(built.prefill.indices.tolist(), built.prefill.lens.tolist(), strict=True)
            assert built.decode.indices.shape == (decodes, 5)
            assert len(found) == len(tokens) + step.padding
            for at, (slots, num_keys) in enumerate(found):
                want = []
                if at < len(tokens) and at not in hidden:
                    req, pos = tokens[at]
                    start = 0 if replay is None else replay[req % 2]
                    keys = oracles.window_positions(pos, 5, start)
                    want = [oracles.block_slot(step.tables[req], key, BLOCK) for key in keys]
                assert (slots, num_keys) == (want + [-1] * (5 - len(want)), len(want))
            check_tokens(step, pcp_rank, built, hidden)


def check_tokens(step, pcp_rank, built, hidden):
    rows = np.repeat(np.arange(len(step.rows[pcp_rank].num_tokens)), step.rows[pcp_rank].num_tokens).tolist()
    assert built.token_to_req.tolist() == rows + [0] * step.padding
    valid = [at not in hidden for at in range(len(rows))]
    assert built.is_valid.tolist() == valid + [False] * step.padding


@settings(max_examples=25)
@given(step=steps(dcp=(1,), ratios=(1,)))
def test_prefills_gather_what_their_tokens_see(step):
    for pcp_rank in range(step.pcp_size):
        built = SwaBuilder(config()).build(window_batch(step, pcp_rank))
        if built.prefill is None:
            continue
        rows, first = step.rows[pcp_rank], built.split.num_decodes
        for at, row in enumerate(range(first, len(rows.req))):
            own = [pos for _, pos in step.tokens(pcp_rank)[rows.query_start_loc[row] : rows.query_start_loc[row + 1]]]
            seen = {key for pos in own for key in oracles.window_positions(pos, 5)}
            if own:
                assert built.prefill.gather_lens[at] == max(own) + 1 - min(seen)
            assert built.prefill.query_lens[at] == len(own)
            assert built.prefill.seq_lens[at] == rows.seq_lens[row]


def test_b101_lanes_behind_a_window_are_scrubbed():
    builder = SwaBuilder(config(window=8, seqs=80))
    tables = np.ones((70, 2), int)
    builder.build(rank_batch([1] * 70, [16] * 70, tables, [0] * 70))
    built = builder.build(rank_batch([1] * 70, [3] * 70, tables, [0] * 70))
    assert built.decode.indices.tolist() == [[BLOCK, BLOCK + 1, BLOCK + 2, -1, -1, -1, -1, -1]] * 70


def test_a_row_without_queries_gathers_the_end_of_its_prefix():
    batch = rank_batch([5, 0], [9, 9], [[1, 2], [3, 4]], [0, 0, 0, 0, 0])
    built = SwaBuilder(config()).build(batch)
    assert built.prefill.gather_lens.tolist() == [9, 4]


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), min_size=1, max_size=4), padding=st.integers(0, 2)
)
def test_draft_blocks_see_the_window_before_and_the_whole_block(rows, padding):
    seq_lens, query_lens = [before + new for before, new in rows], [new for _, new in rows]
    tables = 1 + np.arange(3 * len(rows)).reshape(-1, 3)
    slots = [0] * sum(query_lens) + [-1] * padding
    built = SwaBuilder(config(draft_blocks=True)).build(rank_batch(query_lens, seq_lens, tables, slots, causal=False))
    want = []
    for (before, new), table in zip(rows, tables, strict=True):
        keys = [oracles.block_slot(table, key, BLOCK) for key in range(before + new) if key >= before - 5]
        want += [keys] * new
    want += [[]] * padding
    assert built.decode.indices.tolist() == [keys + [-1] * (64 - len(keys)) for keys in want]
    assert built.decode.lens.tolist() == [len(keys) for keys in want]
    assert not built.decode.causal and built.prefill is None


def test_prefills_of_a_noncausal_batch_stay_causal():
    batch = rank_batch([2, 6], [4, 6], [[1], [2]], [0] * 8, causal=False)
    built = SwaBuilder(config(draft_blocks=True)).build(batch)
    assert built.decode.lens.tolist() == [4, 4]
    assert built.prefill.lens.tolist() == [1, 2, 3, 4, 5, 5]
    assert built.prefill.indices.shape == (6, 5)


@pytest.mark.parametrize("causal", [pytest.param(True, id="causal"), pytest.param(False, id="draft-block")])
def test_a_draft_update_rewrites_the_decodes_in_place(causal):
    builder = SwaBuilder(config(draft_blocks=True, compress_ratios=(0, 4)))
    fields = {"query_lens": [2, 3], "block_tables": [[1, 2, 3], [4, 5, 6]], "causal": causal}
    batch = rank_batch(seq_lens=[7, 9], slot_mapping=[0, 0, 0, 0, -1], **fields)
    built = builder.build(batch)
    addresses = built.decode.indices.data_ptr(), built.decode.schedules["c4a"].data_ptr()
    batch.seq_lens.add_(3)
    batch.slot_mapping.copy_(torch.tensor([0, -1, 0, 0, 0]))
    moved = builder.update_drafts(built, batch)
    fresh = SwaBuilder(config(draft_blocks=True, compress_ratios=(0, 4))).build(
        rank_batch(seq_lens=[10, 12], slot_mapping=[0, -1, 0, 0, 0], **fields)
    )
    assert (moved.decode.indices.data_ptr(), moved.decode.schedules["c4a"].data_ptr()) == addresses
    assert moved.decode.causal is causal
    assert moved.decode.indices.tolist() == fresh.decode.indices.tolist()
    assert moved.decode.lens.tolist() == fresh.decode.lens.tolist()
    assert moved.is_valid.tolist() == [True, False, True, True, True]
    for name, schedule in fresh.decode.schedules.items():
        assert moved.decode.schedules[name].tolist() == schedule.tolist()


def test_a_draft_update_without_decodes_changes_nothing():
    builder = SwaBuilder(config())
    batch = rank_batch([9], [9], [[1, 2]], [0] * 9)
    built = builder.build(batch)
    assert builder.update_drafts(built, batch) is built


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"query_lens": [1], "seq_lens": [3], "block_tables": [[1]]}, "update of 1 rows", id="fewer-rows"),
        pytest.param({"slot_mapping": [0, 0, 0]}, "update of 2 rows and 3 tokens, 2 of them", id="more-tokens"),
        pytest.param({"query_lens": [2, 1], "slot_mapping": [0, 0, 0]}, "3 of them in the first 2", id="longer"),
        pytest.param({"seq_lens": [9, 3]}, "seq_len 9 with a block table of 1", id="grown-past-the-table"),
    ],
)
def test_draft_updates_of_another_shape(change, message):
    given = {"query_lens": [1, 1], "seq_lens": [2, 2], "block_tables": [[1], [2]], "slot_mapping": [0, 0]}
    builder = SwaBuilder(config())
    built = builder.build(rank_batch(**given))
    with pytest.raises(PlanError, match=message):
        builder.update_drafts(built, rank_batch(**{**given, **change}))


@pytest.mark.parametrize(
    ("ratios", "types"),
    [
        pytest.param(None, ["swaonly"], id="no-ratios"),
        pytest.param((0, 1), ["swaonly"], id="window-only"),
        pytest.param((1, 4, 128, 4, 128), ["swaonly", "c4a", "c128a"], id="v4"),
        pytest.param((0, 2), ["swaonly", "c2a"], id="v4.1"),
        pytest.param((4,), ["c4a"], id="no-window-only"),
    ],
)
def test_one_schedule_a_layer_type(ratios, types):
    batch = rank_batch([1, 1], [9, 130], np.ones((2, 17), int), [0, 0])
    built = SwaBuilder(config(compress_ratios=ratios)).build(batch)
    assert list(built.decode.schedules) == types
    assert all(schedule.shape == (4, 2) for schedule in built.decode.schedules.values())


def test_schedules_weigh_the_keys_that_layers_read():
    batch = rank_batch([1, 1], [9, 130], np.ones((2, 17), int), [0, 0])
    schedules = SwaBuilder(config(compress_ratios=(1, 4, 128), index_topk=16)).build(batch).decode.schedules
    assert schedules["swaonly"].tolist() == [[0, 0], [1, 0], [2, 0], [2, 0]]  # 5 and 5 keys: a tile each
    assert schedules["c4a"].tolist() == [[0, 0], [1, 1], [1, 2], [2, 0]]  # 5 + 2 and 5 + 16 keys: 1 and 3 tiles
    assert schedules["c128a"].tolist() == [[0, 0], [1, 0], [2, 0], [2, 0]]  # 5 + 0 and 5 + 1 keys


@pytest.mark.parametrize(
    "chip", [Chip("rocm", cdna=4), Chip("xpu"), Chip("cuda", family=120)], ids=["rocm", "xpu", "sm_12x"]
)
def test_chips_without_schedules_get_none(chip):
    built = SwaBuilder(config(chip=chip)).build(rank_batch([1], [3], [[1]], [0]))
    assert built.decode.schedules == {} and built.decode.lens.tolist() == [3]


def test_without_decode_tokens_there_is_no_schedule():
    built = SwaBuilder(config()).build(rank_batch([9], [9], [[1, 2]], [0] * 9))
    assert built.decode.schedules == {} and built.decode.indices.shape == (0, 5)


def test_parallel_drafting_reaches_twice_as_far():
    batch = rank_batch([7], [9], [[1, 2]], [0] * 7)
    assert SwaBuilder(config()).build(batch).split.num_decodes == 0
    built = SwaBuilder(config(parallel_drafting=True)).build(batch)
    assert built.split.num_decodes == 1 and built.max_decode_query_len == 7


def test_workspace_chunks_come_from_the_prefills():
    batch = rank_batch([9, 9], [9, 40], np.ones((2, 5), int), [0] * 18)
    chunks = SwaBuilder(config()).build(batch).prefill.workspace_chunks(1, 4)
    assert [tuple(chunk) for chunk in chunks] == [(0, 2, 10, 23)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"compress_ratios": (1, 8)}, r"compress ratios \[8\]", id="unknown-ratio"),
        pytest.param({"num_blocks": 1 << 29}, "int32 slots; use at most 268435456 blocks", id="slots-above-int32"),
        pytest.param({"window": 0}, "window_size=0", id="no-window"),
        pytest.param({"index_topk": 0}, "index_topk=0", id="no-topk"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        config(**options)


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        pytest.param({}, {"causal": False}, "not causal without draft blocks", id="no-draft-blocks"),
        pytest.param({}, {"seq_lens": [17, 3]}, "seq_len 17 with a block table of 2 entries", id="table-too-narrow"),
        pytest.param({"seqs": 1}, {}, "2 rows, but the builder's buffers hold 1", id="too-many-rows"),
        pytest.param({"tokens": 1}, {}, "2 tokens, but the builder's buffers hold 1", id="too-many-tokens"),
        pytest.param(
            {"draft_blocks": True, "window": 61},
            {"query_lens": [4, 1], "seq_lens": [9, 1], "slot_mapping": [0] * 5, "causal": False},
            "a draft block of 4 tokens sees 65 keys, and its index rows hold 64",
            id="block-wider-than-its-row",
        ),
    ],
)
def test_batches_that_cannot_work(options, batch, message):
    given = {"query_lens": [1, 1], "seq_lens": [9, 3], "block_tables": [[1, 2], [3, 4]], "slot_mapping": [0, 0]}
    with pytest.raises(PlanError, match=message):
        SwaBuilder(config(**options)).build(rank_batch(**{**given, **batch}))
