"""Whole indexer builds of every rank of random worlds, against keys placed and looked at one by one."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings

from cpkit.budget import Budget
from cpkit.builders.chip import Chip
from cpkit.builders.indexer import IndexerBuilder, IndexerConfig
from tests import oracles
from tests.builders.steps import BLOCK, TwoPassGather, all_equal, steps

CHIPS = {
    "per-token": Chip("cuda", family=100, num_workers=5),
    "native": Chip("cuda", family=90, num_workers=5),
    "flat": Chip("cuda", family=80, num_workers=5),
}


def limits(step):
    """Keys of the workspace and logits of a run: little, but at least one turn of the shards."""
    turn = step.dcp_size * step.interleave // step.ratio
    return max(10, turn), max(40, turn)


def builder(step, pcp_rank, dcp_rank, *, gather_slots=None, chip=CHIPS["native"]):
    workspace, logits = limits(step)
    budget = Budget(
        workspace_tokens=workspace * step.ratio,
        logits_bytes=logits * 4,
        max_num_batched_tokens=128,
        max_num_seqs=16,
        num_speculative_tokens=step.threshold - 1,
    )
    config = IndexerConfig(
        budget,
        chip,
        step.shard(pcp_rank, dcp_rank),
        block_size=BLOCK,
        max_blocks=max(step.tables.shape[1], 1),
        compress_ratio=step.ratio,
    )
    return IndexerBuilder(config, gather_slots=gather_slots)


def build_all(step, **options):
    """{(pcp_rank, dcp_rank): metadata}, every rank's build run one by one, twice where they exchange slots."""
    built = {}
    for dcp_rank in range(step.dcp_size):
        gather = TwoPassGather(step.pcp_size)
        builders = [builder(step, rank, dcp_rank, gather_slots=gather, **options) for rank in range(step.pcp_size)]
        batches = [step.rank_batch(rank, dcp_rank) for rank in range(step.pcp_size)]
        if step.pcp_size > 1 and step.ratio > 1:
            for one, batch in zip(builders, batches, strict=True):
                one.build(batch)
            gather.collecting = False
        for rank, (one, batch) in enumerate(zip(builders, batches, strict=True)):
            built[rank, dcp_rank] = one.build(batch)
    return built


@settings(max_examples=30)
@given(step=steps())
def test_slots(step):
    for (_, dcp_rank), metadata in build_all(step).items():
        flat = step.flat_slots(dcp_rank) if step.ratio == 1 else step.state_slots(dcp_rank)
        want = step.in_layout(flat) if step.pcp_size > 1 else flat + [-1] * step.padding
        assert metadata.slot_mapping.tolist() == want


@settings(max_examples=20)
@given(step=steps())
def test_decode_tokens_see_their_keys(step):
    for chip in CHIPS.values():
        for (pcp_rank, dcp_rank), metadata in build_all(step, chip=chip).items():
            check_decodes(step, pcp_rank, dcp_rank, metadata)


def check_decodes(step, pcp_rank, dcp_rank, metadata):
    decode, split = metadata.decode, metadata.split
    if decode is None:
        assert split.num_decodes == 0
        return
    rows = step.rows[pcp_rank]
    want = []
    for row in range(split.num_decodes):
        first = int(rows.query_start_loc[row])
        for at in range(first, first + int(rows.num_tokens[row])):
            req, pos = step.tokens(pcp_rank)[at]
            states = (pos + 1) // step.ratio
            want.append((row, req, oracles.visible_keys(step.held(req)[dcp_rank], pos, step.ratio), states))
    native = bool((decode.query_lens.sum() != len(decode.query_lens)) or decode.needs_packing)
    width = decode.seq_lens.shape[1]
    if width > 1 or native:
        found = [
            (row, lens)
            for row in range(split.num_decodes)
            for lens in decode.seq_lens[row, : decode.query_lens[row]].tolist()
        ]
        assert decode.query_lens[: split.num_decodes].tolist() == rows.num_tokens[: split.num_decodes].tolist()
    else:
        found = [(row, decode.seq_lens[at, 0].item()) for at, (row, *_) in enumerate(want)]
    assert found == [(row, keys) for row, _, keys, _ in want]
    check_rows(step, decode, want, packed=width > 1 or native)
    assert decode.req_query_lens.tolist() == rows.num_tokens[: split.num_decodes].tolist()


def check_rows(step, decode, want, *, packed):
    """Block tables, global lengths and zeros of padding, per row."""
    table_of, global_of = {}, {}
    for at, (row, req, _, states) in enumerate(want):
        place = row if packed else at
        table_of[place], global_of[place] = step.tables[req].tolist(), states
    nothing = [0] * step.tables.shape[1]
    for place in range(len(decode.query_lens)):
        assert decode.block_tables[place].tolist() == table_of.get(place, nothing)
        if place not in table_of:
            assert not decode.seq_lens[place].any()
        if decode.global_seq_lens is not None:
            assert decode.global_seq_lens[place] == global_of.get(place, 0)
    sizes = {len(decode.query_lens), len(decode.block_tables), len(decode.seq_lens)}
    assert len(sizes) == 1


@settings(max_examples=30)
@given(step=steps())
def test_prefill_tokens_see_their_keys_once(step):
    for (pcp_rank, dcp_rank), metadata in build_all(step).items():
        seen = {}
        for chunk in metadata.prefill.chunks if metadata.prefill else ():
            workspace = (
                gathered_keys(step, chunk, pcp_rank) if chunk.gather else local_keys(step, chunk, pcp_rank, dcp_rank)
            )
            num_tokens = chunk.token_stop - chunk.token_start
            assert len(chunk.key_start) == len(chunk.key_end) == num_tokens
            assert chunk.num_keys <= limits(step)[0] and num_tokens * chunk.num_keys <= limits(step)[1]
            for at in range(num_tokens):
                start, stop = int(chunk.key_start[at]), int(chunk.key_end[at])
                assert 0 <= start <= stop <= len(workspace)
                keys = workspace[start:stop]
                seen.setdefault(chunk.token_start + at, []).extend(keys)
            assert_key_rows(step, chunk, pcp_rank)
        for at, (req, pos) in enumerate(step.tokens(pcp_rank)):
            if at < metadata.split.num_decode_tokens:
                assert at not in seen
                continue
            held = range(int(step.batch.seq_lens[req]))
            if step.pcp_size == 1 and step.dcp_size > 1:
                held = step.held(req)[dcp_rank]
            want = [(req, state) for state in held if (state + 1) * step.ratio <= pos + 1]
            assert seen.get(at, []) == want


def local_keys(step, chunk, pcp_rank, dcp_rank):
    """(request, state) of each workspace key, this rank's own laid row after row."""
    keys = []
    first, stop = chunk.key_span
    for row in range(chunk.row_start, chunk.row_stop):
        req = int(step.rows[pcp_rank].req[row])
        states = int(step.rows[pcp_rank].seq_lens[row]) // step.ratio
        held = step.held(req)[dcp_rank] if step.dcp_size > 1 else range(states)
        keys += [(req, state) for state in held if first <= state < min(stop, states)]
        assert first == 0 or chunk.first_local == sum(state < first for state in held)
    assert chunk.num_local_keys == len(keys) <= chunk.max_local_keys
    return keys


def gathered_keys(step, chunk, pcp_rank):
    """(request, state) of each workspace key, put together from every rank's padded shard; None is padding."""
    reqs = list(dict.fromkeys(step.rows[pcp_rank].req[chunk.row_start : chunk.row_stop].tolist()))
    sent = []
    for rank in range(step.dcp_size):
        for req, width in zip(reqs, chunk.gather.shard_keys.tolist(), strict=True):
            held = step.held(req)[rank][chunk.first_local : chunk.first_local + width]
            sent += [(req, state) for state in held] + [None] * (width - len(held))
    assert len(sent) == chunk.num_keys == step.dcp_size * chunk.max_local_keys
    return [sent[place] for place in chunk.deinterleave_idx().tolist()]


def assert_key_rows(step, chunk, pcp_rank):
    counts = np.diff(chunk.key_start_loc.numpy()).tolist()
    assert chunk.key_rows.tolist() == [row for row, count in enumerate(counts) for _ in range(count)]
    tables = step.tables[step.rows[pcp_rank].req[chunk.row_start : chunk.row_stop]]
    assert chunk.block_tables.tolist() == tables.tolist()


@settings(max_examples=20)
@given(step=steps(pcp=(2, 3), dcp=(2, 3)))
def test_ranks_agree_on_every_gather(step):
    built = build_all(step)
    facts = [
        [
            (
                chunk.key_span,
                chunk.gather.shard_keys.tolist(),
                step.rows[pcp_rank].req[chunk.row_start],
                chunk.fills_workspace,
            )
            for chunk in (metadata.prefill.chunks if metadata.prefill else ())
        ]
        for (pcp_rank, _), metadata in built.items()
    ]
    assert all_equal(facts)
    assert all_equal([metadata.split.num_decodes for metadata in built.values()])


@settings(max_examples=20)
@given(step=steps(pcp=(1,), ratios=(1, 4)))
def test_schedules_deal_tiles_evenly(step):
    for chip in CHIPS.values():
        for metadata in build_all(step, chip=chip).values():
            if metadata.decode is not None:
                check_schedule(metadata.decode, BLOCK // step.ratio)


def check_schedule(decode, tile):
    lens = decode.seq_lens.amax(1).tolist() if len(decode.seq_lens) else []
    groups = list(range(len(lens))) if decode.req is None else decode.req.tolist()
    work = []
    for row in range(len(lens)):
        if row == 0 or groups[row] != groups[row - 1]:
            longest = max(n for n, group in zip(lens, groups, strict=True) if group == groups[row])
            work += [(row, at) for at in range(-(-longest // tile))]
    starts = [tuple(entry) for entry in decode.schedule.tolist()]
    bounds = [work.index(start) if start in work else len(work) for start in starts]
    shares = [stop - first for first, stop in itertools.pairwise(bounds)]
    assert decode.schedule.dtype == torch.int32
    assert bounds[0] == 0 and bounds[-1] == len(work)
    assert min(shares) >= 0 and max(shares) - min(shares) <= 1
