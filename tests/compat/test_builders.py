"""Upstream's builders beside cpkit's: the same values where no trap lies between them, and the traps by name."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compat takes and returns torch tensors")

from cpkit.builders.chip import Chip  # noqa: E402  (needs torch)
from cpkit.builders.common import rank_batch  # noqa: E402
from cpkit.builders.graphs import GraphSupport  # noqa: E402
from cpkit.compat import vllm  # noqa: E402
from cpkit.errors import ConfigError  # noqa: E402
from cpkit.topology import Shard  # noqa: E402
from tests.builders.indexers import A100, HOPPER, builder  # noqa: E402


def engine(*, drafts=1, dcp=1, pcp=1, interleave=1):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32, max_num_seqs=8),
        model_config=SimpleNamespace(max_model_len=64),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp, cp_kv_cache_interleave_size=interleave
        ),
    )


def step(query_lens, seq_lens, *, slots=None, num_tokens=None, **fields):
    loc = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    slots = [0] * sum(query_lens) if slots is None else slots
    return SimpleNamespace(
        query_start_loc=loc,
        query_start_loc_cpu=loc,
        seq_lens=lens,
        seq_lens_cpu=lens,
        num_reqs=len(lens),
        num_actual_tokens=len(slots) if num_tokens is None else num_tokens,
        max_query_len=max(query_lens),
        block_table_tensor=torch.tensor(1 + np.arange(12 * len(seq_lens)).reshape(-1, 12), dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        is_prefilling=None,
        **fields,
    )


def upstream(config=None, *, ratio=1, chip=HOPPER, **options):
    spec = SimpleNamespace(block_size=4, compress_ratio=ratio)
    return vllm.DeepseekV32IndexerMetadataBuilder(spec, ["layer"], config or engine(), "cpu", chip=chip, **options)


def test_the_indexers_agree_where_no_trap_lies():
    for dcp_rank in range(2):
        shard = Shard(dcp_size=2, dcp_rank=dcp_rank, interleave=2)
        batch = step([2, 2, 9, 5], [5, 9, 20, 7])
        theirs = upstream(engine(dcp=2, interleave=2), dcp_rank=dcp_rank).build(0, batch)
        host = rank_batch([2, 2, 9, 5], [5, 9, 20, 7], batch.block_table_tensor.numpy(), [0] * 18)
        ours = builder(chip=HOPPER, shard=shard).build(host)
        assert theirs.decode.seq_lens.tolist() == ours.decode.seq_lens.tolist()
        assert theirs.decode.global_seq_lens.tolist() == ours.decode.global_seq_lens.tolist()
        assert theirs.decode.schedule_metadata.tolist() == ours.decode.schedule.tolist()
        (their_chunk,), (our_chunk,) = theirs.prefill.chunks, ours.prefill.chunks
        assert their_chunk.cu_seqlen_ks.tolist() == our_chunk.key_start.tolist()
        assert their_chunk.cu_seqlen_ke.tolist() == our_chunk.key_end.tolist()
        assert their_chunk.token_to_seq.tolist() == our_chunk.key_rows.tolist()
        assert their_chunk.max_local_total_seq_lens == our_chunk.max_local_keys
        assert their_chunk.skip_kv_gather is not our_chunk.fills_workspace


def test_lengths_below_zero_and_right_aligned_rows_are_upstreams():
    batch = step([3, 2], [0, 9], slots=[0] * 6)
    assert upstream(engine(drafts=2), chip=A100).build(0, batch).decode.seq_lens.flatten().tolist() == [
        -2,
        -1,
        0,
        8,
        9,
        0,
    ]
    host = rank_batch([3, 2], [0, 9], [[1, 2, 3], [4, 5, 6]], [0] * 6)
    ours = builder(chip=A100, drafts=2).build(host)
    assert ours.decode.seq_lens.flatten().tolist() == [0, 0, 0, 8, 9, 0]
    ragged = upstream(engine(drafts=1), chip=HOPPER).build(0, step([2, 0], [9, 3])).decode
    assert ragged.seq_lens.tolist() == [[8, 9], [2, 3]] and ragged.requires_padding
    host = rank_batch([2, 0], [9, 3], [[1, 2, 3], [4, 5, 6]], [0] * 2)
    assert builder(chip=HOPPER).build(host).decode.seq_lens.tolist() == [[8, 9], [0, 0]]


def test_a_lone_request_over_the_workspace_keeps_its_chunk_upstream():
    theirs = upstream(workspace_size=8).build(0, step([9], [20])).prefill.chunks
    assert [chunk.total_seq_lens for chunk in theirs] == [20]
    host = rank_batch([9], [20], [[1, 2, 3, 4, 5]], [0] * 9)
    ours = builder(workspace_tokens=8).build(host).prefill.chunks
    assert [chunk.key_span for chunk in ours] == [(0, 8), (8, 16), (16, 20)]


def test_compressed_keys_under_dcp_are_refused_upstream():
    with pytest.raises(NotImplementedError, match="dcp=2 with compress_ratio=2"):
        upstream(engine(dcp=2, interleave=2), ratio=2)
    shard = Shard(dcp_size=2, dcp_rank=1, interleave=2)
    host = rank_batch([1], [8], [[1, 2]], [7])
    assert builder(shard=shard, compress_ratio=2).build(host).decode.seq_lens.tolist() == [[2]]


def test_compressed_slots_are_gathered_under_pcp():
    sent = []

    def gather(own):
        sent.append(own.tolist())
        return torch.cat([torch.tensor([70, -1]), own])

    config = engine(pcp=2, drafts=0)
    batch = step([1], [4], slots=[-1, -1, 9, -1], num_tokens=1)
    batch.is_prefilling = torch.tensor([False])
    built = upstream(config, ratio=2, pcp_rank=1, gather_slots=gather).build(0, batch)
    assert sent == [[1 * 2 + 1, -1]]
    assert built.slot_mapping.tolist() == [70, -1, 3, -1]
    with pytest.raises(ConfigError, match="no gather_slots"):
        upstream(config, ratio=2).build(0, batch)


def test_the_kpool_builder():
    spec = SimpleNamespace(block_size=4)
    tail = vllm.KpoolTailMetadataBuilder(spec, ["layer"], engine(), "cpu")
    batch = step([1, 2], [7, 2], slots=[0, 0, 0, -1], positions=torch.tensor([6, 0, 1, 0]), num_tokens=3)
    assert tail.build(0, batch).slot_mapping.tolist() == [1 * 4 + 2, 13 * 4, 13 * 4 + 1, -1]
    batch.num_actual_tokens = 4
    assert tail.build(0, batch).slot_mapping.tolist()[-1] == 13 * 4  # padding at position 0, over a real token's row
    assert tail.graph_support is GraphSupport.ALWAYS and not tail.supports_update_block_table


def test_a_draft_update_follows_a_build():
    spec = SimpleNamespace(block_size=4, sliding_window=4)
    window = vllm.DeepseekSparseSWAMetadataBuilder(spec, ["layer"], engine(), "cpu", chip=Chip("rocm", cdna=4))
    with pytest.raises(AssertionError, match="follows a build"):
        window.update_draft_metadata(None, step([1], [4]))
    built = window.build(0, step([1], [4]))
    assert built.tile_sched_swaonly is None and built.decode_swa_lens.tolist() == [4]
