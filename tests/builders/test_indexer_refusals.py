"""Settings and batches that the indexer builder refuses, with values and rule."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cpkit.builders.common import GatheredSlots, RankBatch, WholeRequests, rank_batch
from cpkit.errors import ConfigError, PlanError
from cpkit.topology import Shard
from tests.builders.indexers import batch, builder, under_pcp


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"compress_ratio": 4, "shard": Shard(dcp_size=2, interleave=2)},
            "interleave=2 is not a multiple of compress_ratio=4",
            id="state-on-two-ranks",
        ),
        pytest.param({"compress_ratio": 3}, "block_size=4 is not a multiple of compress_ratio=3", id="split-block"),
        pytest.param(
            {"compress_ratio": 2, "kernel_block_size": 3}, "kernel_block_size=3 does not divide", id="kernel-block"
        ),
        pytest.param(
            {"compress_ratio": 2, "shard": Shard(pcp_size=2)}, "no gather_slots: the slots of states", id="no-gather"
        ),
        pytest.param({"max_blocks": 0}, "max_blocks=0", id="no-blocks"),
        pytest.param({"kernel_block_size": 0}, "kernel_block_size=0", id="no-kernel-block"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        builder(**options)


@pytest.mark.parametrize(
    ("options", "step", "message"),
    [
        pytest.param({}, {"seq_lens": [49]}, "seq_len 49 with a block table of 12 entries", id="table-too-narrow"),
        pytest.param({"max_blocks": 11}, {}, "12 block table entries, but", id="table-too-wide"),
        pytest.param({"tokens": 1}, {}, "2 tokens, but the builder's buffers hold 1", id="too-many-tokens"),
        pytest.param({}, {"causal": False}, "an indexer scores the keys up to each query token", id="not-causal"),
        pytest.param({"seqs": 1}, {"query_lens": [1, 1], "seq_lens": [2, 2]}, "2 rows, but", id="too-many-rows"),
        pytest.param(
            {"workspace_tokens": 3, "shard": Shard(dcp_size=2, interleave=2)},
            {"query_lens": [9], "seq_lens": [9]},
            "no key span fits",
            id="span-below-one-turn",
        ),
    ],
)
def test_batches_that_cannot_work(options, step, message):
    with pytest.raises(PlanError, match=message):
        builder(**options).build(batch(**{"query_lens": [2], "seq_lens": [2], **step}))


def test_flags_are_needed_under_pcp():
    with pytest.raises(PlanError, match="needs is_prefilling for each of 1 rows, got none"):
        builder(shard=Shard(pcp_size=2)).build(under_pcp(batch([2], [2]), [0] * 4))


def test_rows_of_requests_need_sizes_of_whole_requests():
    one = builder(shard=Shard(pcp_size=2, dcp_size=2))
    step = under_pcp(batch([4, 4], [4, 12], is_prefilling=[True, True]), [0] * 16)

    def build(req, shard_lens, shares, of=step):
        one.build(replace(of, requests=WholeRequests(np.array(req), np.array(shard_lens), np.array(shares))))

    with pytest.raises(PlanError, match="row 1 of request 0: largest shard 7 keys, but an earlier row"):
        build([0, 0], [6, 7], [8, 8])
    with pytest.raises(
        PlanError, match="prefill row 1 sees 12 tokens, but the largest shard of its request is 5 tokens on 2"
    ):
        build([0, 0], [5, 5], [8, 8])
    with pytest.raises(PlanError, match=r"request 0 has 8 query tokens on this rank, but its largest share .* is 7"):
        build([0, 0], [6, 6], [7, 7])
    apart = under_pcp(batch([4, 4, 4], [4, 4, 12], is_prefilling=[True] * 3), [0] * 24)
    with pytest.raises(PlanError, match="adjacent"):
        build([0, 1, 0], [6, 2, 6], [8, 4, 8], of=apart)


def test_gathered_slots_have_a_segment_a_rank():
    def gather(own):
        raise AssertionError("refused before the collective")

    one = builder(shard=Shard(pcp_size=2), compress_ratio=2, gather_slots=gather)
    step = rank_batch([1], [2], [[7]], [0], is_prefilling=[True])
    with pytest.raises(PlanError, match="without gathered slots for 2 PCP ranks"):
        one.build(step)
    with pytest.raises(PlanError, match="3 gathered slots for 2 PCP ranks"):
        one.build(under_pcp(step, [0, 0, 0]))
    both = builder(shard=Shard(pcp_size=2, dcp_size=2, interleave=2), compress_ratio=2, gather_slots=gather)
    with pytest.raises(PlanError, match="without writes_kv"):
        both.build(under_pcp(step, [0, 0]))
    with pytest.raises(PlanError, match="writes_kv has 2 entries for a segment of 3 tokens"):
        both.build(under_pcp(step, [0] * 6, writes_kv=[True, True]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"seq_lens": torch.tensor([9], dtype=torch.int64)}, r"seq_lens is int64 \[1\] on cpu", id="dtype"),
        pytest.param({"seq_lens": torch.zeros(2, dtype=torch.int32)}, r"seq_lens is int32 \[2\]", id="b15-length"),
        pytest.param({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping is int32", id="b47-32-bit"),
        pytest.param({"seq_lens": torch.zeros(1, dtype=torch.int32, device="meta")}, "on meta: it must", id="device"),
        pytest.param(
            {"block_tables": torch.zeros(12, 2, dtype=torch.int32)[:, 1:].T}, "must be contiguous", id="strides"
        ),
        pytest.param({"host_query_start_loc": np.array([0, 2, 1])}, "never falls", id="falling-boundaries"),
        pytest.param({"host_query_start_loc": np.array([1, 2])}, "starts at 0", id="boundaries-from-1"),
        pytest.param({"num_tokens": 1}, "num_tokens=1 with 2 query tokens", id="fewer-tokens-than-queries"),
        pytest.param({"num_tokens": 3}, "num_tokens=3 with 2 query tokens and 2 slots", id="tokens-without-slots"),
        pytest.param({"max_seq_lens": np.array([1])}, "row 0: seq_len 1 with 2 query tokens", id="below-queries"),
        pytest.param({"is_prefilling": np.array([True, True])}, "is_prefilling has 2 entries for 1 rows", id="flags"),
        pytest.param({"positions": torch.zeros(1, dtype=torch.int64)}, "1 positions for 2 query", id="positions"),
        pytest.param(
            {"requests": WholeRequests(np.array([0, 0]), np.array([5]), np.array([2]))},
            "req has 2 entries for 1 rows",
            id="requests",
        ),
        pytest.param(
            {"gathered": GatheredSlots(torch.zeros(4, dtype=torch.int32))},
            "gathered slot_mapping is int32",
            id="gathered-32-bit",
        ),
    ],
)
def test_batches_whose_parts_contradict_each_other(fields, message):
    step = batch([2], [9])
    with pytest.raises(PlanError, match=message):
        replace(step, **fields)
    assert isinstance(step, RankBatch)


def test_values_that_a_batch_cannot_hold():
    with pytest.raises(PlanError, match="num_tokens=2 and no rows"):
        rank_batch([], [], np.zeros((0, 1), int), [-1, -1])
    with pytest.raises(PlanError, match=r"positions holds 0\.5"):
        rank_batch([1], [1], [[1]], [0], positions=[0.5])


def test_a_draft_update_of_another_shape():
    one = builder()
    built = one.build(batch([1, 1], [2, 2]))
    with pytest.raises(PlanError, match="a draft update of 1 rows and 1 tokens, 1 of them in the first 2 rows, after"):
        one.update_drafts(built, batch([1], [2]))
    with pytest.raises(PlanError, match="seq_len 49 with a block table of 12"):
        one.update_drafts(built, batch([1, 1], [49, 2]))


def test_lengths_beyond_int32_are_refused():
    with pytest.raises(PlanError, match="seq_lens reaches 2147483648, outside int32"):
        rank_batch([1], [1 << 31], [[1]], [0])


def test_a_workspace_beyond_int32_is_refused():
    huge = builder(workspace_tokens=1 << 40, logits_bytes=1 << 50, max_blocks=1 << 10, block_size=1 << 21, seqs=2)
    step = batch([5, 5], [(1 << 31) - 1] * 2, tables=np.ones((2, 1 << 10), int))
    with pytest.raises(PlanError, match="keys of a prefill chunk reaches 4294967294, outside int32"):
        huge.build(step)
