"""Indexer metadata: prefill chunks and decode rows."""

import torch

from cpkit.compat import vllm
from tests.golden_adapters.tensors import adapter, i32, i64, rows


@adapter
def build_prefill_chunk_metadata(case):
    plan = None
    if case.pcp_rows is not None:
        plan = vllm.build_pcp_global_chunk_plan(
            i64(case.pcp_rows["row_req_idx"]),
            i64(case.pcp_rows["row_shard_rows"]),
            case.dcp_world_size,
            case.interleave,
        )

    def on_rank(rank):
        chunk = vllm.build_prefill_chunk_metadata(
            case.row_start,
            case.row_stop,
            i32(case.query_start_loc),
            i32(case.seq_lens),
            torch.zeros(len(case.seq_lens), 1, dtype=torch.int32),
            case.compress_ratio,
            None if case.query_slice is None else slice(*case.query_slice),
            case.skip_kv_gather,
            dcp_rank=rank,
            dcp_world_size=case.dcp_world_size,
            cp_kv_cache_interleave_size=case.interleave,
            pcp_plan=plan,
        )
        if chunk is None:
            return None
        fields = dict(vars(chunk), skip_gather=chunk.skip_kv_gather)
        assert len(fields.pop("block_table")) == case.row_stop - case.row_start
        del fields["pcp_plan"], fields["skip_kv_gather"]
        return fields if plan is None else {**fields, "deinterleave_idx": plan.deinterleave_idx}

    return {"rank_results": [on_rank(rank) for rank in range(case.dcp_world_size if plan is None else 1)]}


@adapter
def prepare_decode_tensors(case):
    buffer = torch.full((case.capacity,), 77, dtype=torch.int32)
    result = vllm.prepare_decode_tensors(
        i32(case.seq_lens),
        rows(case.block_table),
        i32(case.decode_lens),
        case.num_decode_tokens,
        use_native=case.use_native,
        next_n=case.next_n,
        adaptive=case.adaptive,
        supports_varlen=case.supports_varlen,
        seq_lens_buffer=buffer,
    )
    in_buffer = result.seq_lens.data_ptr() == buffer.data_ptr()
    assert in_buffer != (case.use_native and case.next_n == 1)
    assert not in_buffer or not buffer[result.seq_lens.numel() :].any()
    return {
        "out_seq_lens": result.seq_lens,
        "out_block_table": result.block_table,
        "out_decode_lens": result.decode_lens,
        "batch_size": result.batch_size,
        "requires_padding": result.requires_padding,
        "path": result.path,
    }


@adapter
def prepare_global_decode_seq_lens(case):
    lens = vllm.prepare_global_decode_seq_lens(
        i32(case.global_seq_lens), i32(case.decode_lens), case.num_decode_tokens, case.use_native
    )
    return {"out": lens}


@adapter
def dcp_localize_decode_seq_lens(case):
    outputs = {"rank_out": [], "in_place": []}
    for rank in range(case.dcp_world_size):
        lens = i32(case.seq_lens)
        local = vllm.dcp_localize_decode_seq_lens(
            lens, case.dcp_world_size, rank, case.interleave, is_buffer_view=case.is_buffer_view
        )
        outputs["rank_out"].append(local)
        outputs["in_place"].append(local.data_ptr() == lens.data_ptr())
    return outputs


@adapter
def indexer_decode_metadata_varlen(case):
    result = vllm.indexer_decode_metadata_varlen(
        i32(case.query_start_loc),
        i32(case.seq_lens),
        rows(case.block_table),
        case.num_reqs,
        case.num_tokens,
        torch.full((case.capacity,), 77, dtype=torch.int32),
    )
    fields = vars(result)
    return {
        "out_seq_lens": fields.pop("seq_lens"),
        "out_block_table": fields.pop("block_table"),
        **fields,
    }


@adapter
def dsa_indexer_uses_fp4(case):
    return {"uses_fp4": vllm.dsa_indexer_uses_fp4(vllm.IndexerCacheConfig(**vars(case)))}
