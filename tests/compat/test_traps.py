"""Where compat follows upstream into a trap, and what the planner does with the same input instead."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compat takes and returns torch tensors")

from cpkit.arrays import prefix_sum  # noqa: E402  (after the check for torch)
from cpkit.builders.chip import Chip  # noqa: E402
from cpkit.builders.indexer_dtype import indexer_uses_fp4  # noqa: E402
from cpkit.compat import vllm  # noqa: E402
from cpkit.errors import ConfigError, PlanError  # noqa: E402
from cpkit.kernels.candidates import best_candidates  # noqa: E402
from cpkit.planner.chunks import Chunk, split_chunks_keeping_keys  # noqa: E402
from cpkit.planner.decode import flatten_decodes, native_decodes  # noqa: E402
from cpkit.planner.gather import plan_gather  # noqa: E402
from cpkit.planner.interleave import local_lens  # noqa: E402
from cpkit.planner.order import split_decodes_and_prefills  # noqa: E402
from cpkit.planner.remap import gathered_rows  # noqa: E402
from cpkit.planner.slots import token_positions  # noqa: E402
from cpkit.planner.state_slots import check_states_whole  # noqa: E402


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def i64(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_lengths_beyond_int32_wrap_upstream():
    far = 2**31
    assert vllm.get_dcp_local_seq_lens(i64(far), 2, 0).item() == -(2**30)
    assert local_lens(np.array([far]), 0, 2, 1).item() == 2**30


def test_variable_decodes_fall_below_zero_upstream():
    options = {"use_native": False, "next_n": 3, "supports_varlen": True}
    upstream = vllm.prepare_decode_tensors(i32(0), i32(7).reshape(1, 1), i32(3), 3, **options)
    assert upstream.seq_lens.tolist() == [-2, -1, 0]
    assert flatten_decodes(np.array([0]), np.array([3])).seq_lens.tolist() == [0, 0, 0]


def test_ragged_native_lengths_are_right_aligned_upstream():
    tables = torch.zeros(2, 1, dtype=torch.int32)
    upstream = vllm.prepare_decode_tensors(i32(9, 4), tables, i32(3, 1), 4, use_native=True, next_n=3)
    assert upstream.seq_lens.tolist() == [[7, 8, 9], [2, 3, 4]]
    assert upstream.requires_padding
    assert native_decodes(np.array([9, 4]), np.array([3, 1])).tolist() == [[7, 8, 9], [4, 0, 0]]


def test_global_ids_lose_their_last_bit_upstream():
    column = 2**23
    logits = torch.zeros(1, column + 1)
    _, ids = vllm.pack_dcp_topk(i32(column).reshape(1, 1), logits, 2, 1, 1)
    assert int(ids.item()) == 2**24  # 2 * 2^23 + 1 in float32


def test_padded_keys_wrap_to_zero_upstream():
    rows = i64(0, 1), i32(2**30, 5), i32(1, 1)
    assert vllm.split_pcp_dcp_prefill_chunks(*rows, 4, 100, 4000) == [(slice(0, 2), slice(0, 2))]
    budgets = {"workspace_keys": 100, "max_logits": 1000}
    chunks = split_chunks_keeping_keys(np.array([1, 1]), np.array([2**32, 20]), **budgets)
    assert [(chunk.row_start, chunk.row_stop) for chunk in chunks] == [(0, 1), (1, 2)]


def test_only_the_first_rows_shard_is_read_upstream():
    plan = vllm.build_pcp_global_chunk_plan(i64(4, 4), i64(3, 5), 2, 1)
    assert plan.padded_local_cu.tolist() == [0, 3, 3]
    chunk = Chunk(row_start=0, row_stop=2, key_start=0, key_stop=10, num_keys=6, num_queries=2, run=2)
    with pytest.raises(PlanError, match="row 1 of request 4: largest shard 5"):
        plan_gather(chunk, np.array([4, 4]), np.array([3, 5]), dcp_size=2, interleave=1)


def test_negative_positions_write_another_block_upstream():
    slots = vllm.get_compressed_slot_mapping(3, i64(5, 6, 7), i32(0, 3), i32(1), i32(9).reshape(1, 1), 4, 2)
    assert slots.tolist() == [-1, 9 * 4, -1]  # position -1 as if it were state 0
    with pytest.raises(PlanError, match="seq_len=1 < query_len=3"):
        token_positions(np.array([1]), np.array([3]))


def test_gathered_positions_past_the_decode_table_are_dropped_upstream():
    slots, counts = vllm.convert_req_index_to_global_slot(
        i32(0),
        i32(3).reshape(1, 1),
        i32(9).reshape(1, 1),
        4,
        dcp_world_size=2,
        prefill_request_ids=i32(0),
        prefill_workspace_starts=i32(10),
        prefill_rank_stride=50,
    )
    assert (slots.item(), counts.item()) == (-1, 0)
    row = gathered_rows(np.array([[9]]), np.array([10]), rank_stride=50, dcp_size=2, interleave=1)
    assert row.item() == 50 + 10 + 4


def test_draft_rows_of_a_nonempty_request_are_not_masked_upstream():
    """Rank 1 of 2 holds one key of a 2-token context; the first of two draft tokens sees none of it."""
    masked = vllm.mask_dcp_empty_shards(torch.zeros(2, 1), i32(1), i32(0, 2))
    assert torch.isfinite(masked).all()
    lens = flatten_decodes(np.array([2]), np.array([2])).seq_lens
    assert local_lens(lens, 1, 2, 1).tolist() == [0, 1]


def test_empty_row_0_is_no_yardstick_upstream():
    """Known to be short throughout, a batch is all decodes upstream, uniform or not."""
    query_lens = np.array([0, 1, 1])
    batch = type("Batch", (), {"max_query_len": 1, "num_reqs": 3, "num_actual_tokens": 2, "is_prefilling": None})()
    batch.query_start_loc_cpu = torch.from_numpy(prefix_sum(query_lens))
    assert vllm.split_decodes_and_prefills(batch, 1, require_uniform=True) == (3, 0, 2, 0)
    assert split_decodes_and_prefills(query_lens, threshold=1, require_uniform=True) == (1, 2, 0, 2)


def test_states_of_a_narrow_interleave_share_a_slot_upstream():
    shard = {"dcp_world_size": 2, "dcp_rank": 1, "cp_kv_cache_interleave_size": 1}
    batch = torch.zeros(8, dtype=torch.int64), i32(0, 8), i32(8), i32(3).reshape(1, 1)
    slots = vllm.get_compressed_slot_mapping(8, *batch, 4, 4, **shard).tolist()
    assert slots[3] == slots[7] == 3 * 4
    with pytest.raises(ConfigError, match="a state would span two of the dcp_size=2 ranks"):
        check_states_whole(4, 2, 1)


def test_mxfp4_on_rocm_is_for_one_model_upstream():
    machine = {"platform": "rocm", "cdna_version": 4, "aiter_enabled": True}
    v4 = vllm.IndexerCacheConfig("mxfp4", model_type="deepseek_v4", **machine)
    with pytest.raises(ValueError, match="kernels exist for deepseek_v41 alone"):
        vllm.dsa_indexer_uses_fp4(v4)
    assert indexer_uses_fp4("mxfp4", Chip("rocm", cdna=4, kernel_library=True), model_type="deepseek_v4")


def test_sharded_decodes_with_dcp_are_refused_in_both():
    sizes = {"pcp_world_size": 2, "dcp_world_size": 2, "shard_decode_requests": True}
    with pytest.raises(ConfigError, match="shard_decode_requests with dcp=2"):
        vllm.pcp_partition(i32(1, 1), torch.tensor([False, False]), i64(7, 8), **sizes)


def test_nan_scores_are_selected_upstream():
    scores = torch.tensor([[1.0, float("nan")]])
    assert vllm.merge_dcp_topk_global(scores[None], torch.tensor([[[3.0, 4.0]]]), 1).tolist() == [[4]]
    assert best_candidates(scores, torch.tensor([[3, 4]]), 1)[1].tolist() == [[3]]
