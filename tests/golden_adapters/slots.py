"""Slot mappings."""

import torch

from cpkit.compat import vllm
from tests.golden_adapters.tensors import adapter, i32, i64, rows


@adapter
def get_compressed_slot_mapping(case):
    buffer = None if case.out_len is None else torch.full((case.out_len,), 77)
    slots = vllm.get_compressed_slot_mapping(
        case.num_tokens,
        i64(case.slot_mapping),
        i32(case.query_start_loc),
        i32(case.seq_lens),
        rows(case.block_table),
        case.block_size,
        case.compress_ratio,
        out=buffer,
    )
    return {"slots": slots} if buffer is None else {"slots": slots, "buffer": buffer}


@adapter
def get_compressed_slot_mapping_dcp(case):
    slots = [
        vllm.get_compressed_slot_mapping(
            case.num_tokens,
            i64(case.rank_slot_mapping[rank]),
            i32(case.query_start_loc),
            i32(case.seq_lens),
            rows(case.block_table),
            case.block_size,
            case.compress_ratio,
            dcp_world_size=case.dcp_world_size,
            dcp_rank=rank,
            cp_kv_cache_interleave_size=case.interleave,
        )
        for rank in range(case.dcp_world_size)
    ]
    return {"rank_slots": slots}


@adapter
def compute_kpool_tail_slot_mapping(case, skip_null_blocks=False):
    slots = vllm.compute_kpool_tail_slot_mapping(
        i64(case.slot_mapping),
        rows(case.block_table),
        i32(case.query_start_loc),
        i64(case.positions),
        case.num_actual_tokens,
        case.num_reqs,
        case.kpool,
        skip_null_blocks=skip_null_blocks,
    )
    return {"slots": slots}


@adapter
def compute_kpool_tail_slot_mapping_null_block(case):
    return compute_kpool_tail_slot_mapping(case, skip_null_blocks=True)


@adapter
def convert_req_index_to_global_slot(case):
    prefill = case.prefill or {"request_ids": None, "workspace_starts": None, "rank_stride": 0}

    def on_rank(rank, compact):
        return vllm.convert_req_index_to_global_slot(
            i32(case.req_id),
            rows(case.block_table),
            rows(case.token_indices),
            case.block_size,
            block_stride_rows=case.block_stride_rows,
            dcp_world_size=case.dcp_world_size,
            dcp_rank=rank,
            interleave=case.interleave,
            idx_mapping=i32(case.idx_mapping),
            prefill_request_ids=i32(prefill["request_ids"]),
            prefill_workspace_starts=i32(prefill["workspace_starts"]),
            prefill_rank_stride=prefill["rank_stride"],
            compact=compact,
        )

    outputs = {"rank_in_place": [], "rank_counts": [], "rank_sets": []}
    for rank in range(case.dcp_world_size):
        in_place, counts = on_rank(rank, compact=False)
        compacted, compact_counts = on_rank(rank, compact=True)
        assert torch.equal(counts, compact_counts)
        for row, count in zip(compacted.tolist(), counts.tolist(), strict=True):
            assert set(row[count:]) <= {-1}
        outputs["rank_in_place"].append(in_place)
        outputs["rank_counts"].append(counts)
        outputs["rank_sets"].append(
            [sorted(row[:count]) for row, count in zip(compacted.tolist(), counts.tolist(), strict=True)]
        )
    return outputs
