"""Indexer builds by hand: paths, padding, compressed caches, PCP, updates, reused buffers, upper bounds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cpkit.builders.common import rank_batch
from cpkit.builders.graphs import GraphSupport
from cpkit.errors import PlanError
from cpkit.topology import Shard
from tests.builders.indexers import A100, BLACKWELL, HOPPER, batch, builder, under_pcp


def test_flat_decodes_on_every_path_to_them():
    step = batch([3, 1, 2, 0], [10, 7, 12, 0], padding=2)
    for options in ({"chip": A100, "drafts": 2}, {"chip": HOPPER, "drafts": 2}, {"chip": BLACKWELL, "drafts": 2}):
        built = builder(**options).build(step)
        decode = built.decode
        assert tuple(built.split) == (4, 0, 8, 0)
        assert decode.seq_lens.tolist() == [[8], [9], [10], [7], [11], [12], [0], [0]]
        assert decode.query_lens.tolist() == [1] * 8
        assert decode.block_tables[:, 0].tolist() == [1, 1, 1, 13, 25, 25, 0, 0]
        assert decode.req_query_lens.tolist() == [3, 1, 2, 0]
        assert (decode.is_uniform, decode.max_query_len, decode.needs_packing) == (False, 3, False)
        per_token = options["chip"] is BLACKWELL
        assert (decode.req.tolist() if per_token else decode.req) == ([0, 0, 0, 1, 2, 2, 4, 5] if per_token else None)


def test_b77_ragged_decodes_are_a_row_a_token():
    decode = builder(chip=A100, drafts=3).build(batch([3, 1, 4, 0], [10, 7, 12, 0])).decode
    assert decode.seq_lens.tolist() == [[8], [9], [10], [7], [9], [10], [11], [12]]
    assert decode.block_tables[:, 0].tolist() == [1, 1, 1, 13, 25, 25, 25, 25]


def test_b87_three_query_tokens_are_not_floored_to_pairs():
    decode = builder(chip=HOPPER, drafts=3).build(batch([3], [10])).decode
    assert decode.seq_lens.tolist() == [[8], [9], [10]] and decode.query_lens.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "padding", "rows", "packing"),
    [
        pytest.param([2, 2], [5, 9], 0, [[4, 5], [8, 9]], False, id="uniform"),
        pytest.param([2, 2], [5, 9], 2, [[4, 5], [8, 9], [0, 0]], False, id="b21-padding-fills-a-row"),
        pytest.param([2, 2], [5, 9], 3, [[4, 5], [8, 9]], True, id="padding-fills-no-row"),
        pytest.param([2, 2, 0], [5, 9, 0], 0, [[4, 5], [8, 9], [0, 0]], True, id="empty-row"),
        pytest.param([1, 1], [5, 9], 2, [[5], [9], [0], [0]], False, id="single-tokens-padded"),
        pytest.param([0, 0], [0, 0], 2, [[0], [0]], False, id="padding-rows-alone"),
    ],
)
def test_native_decodes(query_lens, seq_lens, padding, rows, packing):
    decode = builder().build(batch(query_lens, seq_lens, padding=padding)).decode
    assert decode.seq_lens.tolist() == rows
    assert decode.needs_packing is packing
    assert decode.query_lens.tolist() == query_lens + [0] * (len(rows) - len(query_lens))
    tables = [1 + 12 * row if new else 0 for row, new in enumerate(query_lens)] + [0] * len(rows)
    assert decode.block_tables[:, 0].tolist() == tables[: len(rows)]
    assert not decode.block_tables[decode.query_lens == 0].any()


def test_b67_lengths_are_localised_after_the_expansion():
    shard = Shard(dcp_size=2, dcp_rank=1)
    decode = builder(shard=shard, drafts=2, chip=A100).build(batch([3], [10])).decode
    assert decode.seq_lens.tolist() == [[4], [4], [5]]
    assert decode.global_seq_lens.tolist() == [8, 9, 10]
    native = builder(shard=shard, chip=HOPPER).build(batch([2], [10])).decode
    assert native.seq_lens.tolist() == [[4, 5]] and native.global_seq_lens.tolist() == [10]


@pytest.mark.parametrize("chip", [A100, HOPPER, BLACKWELL], ids=["flat", "native", "per-token"])
def test_b69_a_padding_request_without_context_never_falls_below_zero(chip):
    drafts = 2 if chip is A100 else 3
    decode = builder(chip=chip, drafts=drafts).build(batch([2, 2], [5, 0])).decode
    assert decode.seq_lens.flatten().tolist() == [4, 5, 0, 0]


def test_compressed_cache_with_smaller_kernel_blocks():
    tables = [[20, 21, 22, 23, 16, 17, 18, 19], [148, 149, 150, 151, 116, 117, 118, 119]]
    one = builder(compress_ratio=4, block_size=16, kernel_block_size=4, drafts=0)
    built = one.build(batch([1, 1], [8, 20], tables=tables))
    assert built.slot_mapping.tolist() == [5 * 4 + 1, 29 * 4 + 0]
    assert built.decode.block_tables.tolist() == [[5, 4], [37, 29]]
    assert built.decode.seq_lens.tolist() == [[2], [5]]


def test_a_state_without_a_block_is_not_written():
    built = builder(compress_ratio=2, drafts=0).build(batch([1, 1], [4, 4], tables=[[7], [0]]))
    assert built.slot_mapping.tolist() == [7 * 2 + 1, -1]


def test_a_prompt_longer_than_every_budget_is_cut_into_spans():
    built = builder(workspace_tokens=8, logits_bytes=16 * 4).build(batch([3], [19]))
    facts = [
        (chunk.key_span, (chunk.token_start, chunk.token_stop), chunk.fills_workspace, chunk.last_span)
        for chunk in built.prefill.chunks
    ]
    assert facts == [
        ((0, 8), (0, 2), True, False),
        ((0, 8), (2, 3), False, False),
        ((8, 16), (0, 2), True, False),
        ((8, 16), (2, 3), False, False),
        ((16, 19), (0, 2), True, True),
        ((16, 19), (2, 3), False, True),
    ]
    ends = [chunk.key_end.tolist() for chunk in built.prefill.chunks]
    assert ends == [[8, 8], [8], [8, 8], [8], [1, 2], [3]]
    assert built.prefill.max_seq_len == 19


def test_widened_lengths_count_in_the_budgets_alone():
    step = batch([4, 4], [10, 10])
    plain = builder(workspace_tokens=24).build(step).prefill.chunks
    wide = builder(workspace_tokens=24, widen_lens=lambda keys: keys + 6).build(step).prefill.chunks
    assert [(chunk.row_start, chunk.row_stop) for chunk in plain] == [(0, 2)]
    assert [(chunk.row_start, chunk.row_stop) for chunk in wide] == [(0, 1), (1, 2)]
    assert [chunk.num_keys for chunk in wide] == [10, 10]
    spans = builder(workspace_tokens=8, widen_lens=lambda keys: keys + 20).build(batch([4], [10])).prefill.chunks
    assert [(chunk.key_span, chunk.last_span) for chunk in spans] == [((0, 8), False), ((8, 10), True)]
    with pytest.raises(PlanError, match="widening adds only"):
        builder(widen_lens=lambda keys: keys - 1).build(step)


def test_prefills_without_a_whole_state_have_no_chunk():
    built = builder(compress_ratio=4, block_size=16).build(batch([3], [3]))
    assert built.prefill.chunks == () and built.prefill.max_seq_len == 3


def test_host_bounds_size_the_chunks_and_the_device_decides_the_ranges():
    exact = batch([3, 2], [9, 8])
    loose = replace(exact, max_seq_lens=np.array([12, 8]))
    chunk = builder(drafts=0).build(loose).prefill.chunks[0]
    assert chunk.num_keys == 20 and chunk.key_start_loc.tolist() == [0, 12, 20]
    assert chunk.key_start.tolist() == [0, 0, 0, 12, 12]
    assert chunk.key_end.tolist() == [7, 8, 9, 19, 20]


def test_adaptive_lengths_follow_the_device():
    exact = batch([3, 3], [10, 20])
    shorter = replace(exact, query_start_loc=torch.tensor([0, 1, 4], dtype=torch.int32))
    decode = builder(chip=BLACKWELL, drafts=2, adaptive=True).build(shorter).decode
    assert decode.seq_lens.flatten().tolist() == [10, 18, 19, 20, 0, 0]
    assert decode.req.tolist() == [0, 1, 1, 1, 2, 3]
    assert decode.req_query_lens.tolist() == [1, 3] and decode.max_query_len == 3


def test_ragged_native_rows_are_packed_from_the_left():
    exact = batch([2, 2], [10, 20])
    shorter = replace(exact, query_start_loc=torch.tensor([0, 1, 3], dtype=torch.int32))
    decode = builder(chip=A100, drafts=1, adaptive=True).build(shorter).decode
    assert decode.seq_lens.tolist() == [[10, 0], [19, 20]]
    assert decode.query_lens.tolist() == [1, 2] and decode.needs_packing


def test_b85_an_idle_rank_enters_the_gather_and_has_no_work():
    entered = []

    def gather(own):
        entered.append(own.tolist())
        return torch.cat([own, torch.tensor([10, -1])])

    one = builder(shard=Shard(pcp_size=2, pcp_rank=0), compress_ratio=2, gather_slots=gather)
    idle = rank_batch([0], [0], [[7]], [], is_prefilling=[True])
    built = one.build(under_pcp(idle, [-1, -1, 28, 29]))
    assert entered == [[-1, -1]]
    assert built.slot_mapping.tolist() == [-1, -1, 10, -1]
    assert (tuple(built.split), built.prefill, built.decode) == ((0, 0, 0, 0), None, None)


@pytest.mark.parametrize(("pcp_rank", "own"), [(0, [-1, -1]), (1, [-1, 15])])
def test_a_pcp_rank_reads_its_own_segment(pcp_rank, own):
    sent = []

    def gather(own):
        sent.append(own.tolist())
        return torch.cat([own, own])

    one = builder(shard=Shard(pcp_size=2, pcp_rank=pcp_rank), compress_ratio=2, gather_slots=gather)
    one.build(under_pcp(rank_batch([2], [4], [[7]], [-1, -1], is_prefilling=[True]), [30, -1, 30, 31]))
    assert sent == [own]


def test_a_dummy_batch_under_pcp_and_dcp_has_a_request_a_row():
    shard = Shard(pcp_size=2, dcp_size=2, dcp_rank=1)
    step = under_pcp(batch([4, 4], [4, 7], is_prefilling=[True, True]), [0] * 16)
    chunk = builder(shard=shard).build(step).prefill.chunks[0]
    assert chunk.gather.shard_keys.tolist() == [2, 4]
    assert chunk.key_start.tolist() == [0] * 4 + [4] * 4
    assert chunk.key_end.tolist() == [1, 2, 3, 4, 8, 9, 10, 11]


def test_short_extends_are_prefills_under_pcp_alone():
    step = batch([1, 1], [9, 9], is_prefilling=[False, True])
    assert builder().build(step).split.num_decodes == 2
    assert builder(shard=Shard(pcp_size=2)).build(under_pcp(step, [0] * 4)).split.num_decodes == 1


def test_an_empty_decode_before_prefills():
    for chip in (A100, HOPPER, BLACKWELL):
        built = builder(chip=chip, drafts=2).build(batch([0, 7], [3, 9]))
        assert tuple(built.split) == (1, 1, 0, 7)
        assert built.decode.req_query_lens.tolist() == [0]
        assert not built.decode.seq_lens.any()
        assert built.decode.schedule[-1].tolist() == built.decode.schedule[0].tolist()


@pytest.mark.parametrize(
    ("chip", "drafts", "adaptive", "support"),
    [
        pytest.param(BLACKWELL, 5, False, GraphSupport.ALWAYS, id="per-token"),
        pytest.param(A100, 2, False, GraphSupport.ALWAYS, id="flat"),
        pytest.param(HOPPER, 1, True, GraphSupport.ALWAYS, id="adaptive-hopper"),
        pytest.param(HOPPER, 3, False, GraphSupport.UNIFORM, id="native"),
    ],
)
def test_graph_support(chip, drafts, adaptive, support):
    assert builder(chip=chip, drafts=drafts, adaptive=adaptive).graph_support is support


@pytest.mark.parametrize("chip", [A100, HOPPER, BLACKWELL], ids=["flat", "native", "per-token"])
def test_a_draft_update_rebuilds_the_decodes_in_place(chip):
    one = builder(chip=chip, drafts=2 if chip is A100 else 1)
    step = batch([2, 2, 9], [5, 9, 9])
    built = one.build(step)
    addresses = [tensor.data_ptr() for tensor in (built.decode.seq_lens, built.decode.schedule)]
    step.seq_lens.add_(1)
    moved = one.update_drafts(built, step)
    assert moved.decode.seq_lens.flatten().tolist() == [5, 6, 9, 10]
    assert [tensor.data_ptr() for tensor in (moved.decode.seq_lens, moved.decode.schedule)] == addresses
    assert moved.prefill is built.prefill and moved.slot_mapping is built.slot_mapping
    alone = one.build(batch([9], [9]))
    assert one.update_drafts(alone, step) is alone


def buffers_of(one):
    stage, found = one._decode.buffers, [one._tables, one._slots.segment, one._slots.gathered]
    return found + [getattr(stage, name) for name in stage.__dataclass_fields__]


def tensors_of(value):
    """Every tensor of a result, by its place in it."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    if isinstance(value, tuple):
        pairs = enumerate(value)
    else:
        pairs = [(name, getattr(value, name)) for name in getattr(value, "__dataclass_fields__", ())]
    return {f"{name}.{rest}": found for name, part in pairs for rest, found in tensors_of(part).items()}


@pytest.mark.parametrize("chip", [A100, HOPPER, BLACKWELL], ids=["flat", "native", "per-token"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_b49_small_builds_keep_nothing_of_large_ones(chip, ratio):
    options = {"chip": chip, "drafts": 2 if chip is A100 else 1, "compress_ratio": ratio}
    options["shard"] = Shard(dcp_size=2, dcp_rank=1, interleave=2)
    small, large = batch([2, 2, 0, 5], [5, 9, 0, 7], padding=1), batch([2] * 6, [31, 40, 8, 9, 22, 2], padding=12)
    want = tensors_of(builder(**options).build(small))
    used = builder(**options)
    for buffer in buffers_of(used):
        buffer.tensor.fill_(1234)
    used.build(large)
    first = tensors_of(used.build(small))
    assert {name: tensor.tolist() for name, tensor in first.items()} == {
        name: tensor.tolist() for name, tensor in want.items()
    }
    assert all(not tail.any() for tail in tails(used, first))
    again = tensors_of(used.build(small))
    fixed = [name for name in want if name.startswith("decode")]
    assert fixed and [again[name].data_ptr() for name in fixed] == [first[name].data_ptr() for name in fixed]


def tails(one, built):
    """What lies behind a build's values in the buffers of lengths."""
    stage = one._decode.buffers
    for name in ("seq_lens", "query_lens", "req_query_lens"):
        yield getattr(stage, name).tensor[built[f"decode.{name}."].numel() :]
