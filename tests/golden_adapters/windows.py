"""Sliding windows."""

from cpkit.compat import vllm
from tests.golden_adapters.tensors import adapter, flags, i32, rows


def swa_inputs(case):
    return {
        "query_start_loc": i32(case.query_start_loc),
        "seq_lens": i32(case.seq_lens),
        "token_to_req_indices": i32(case.token_to_req),
        "is_valid_token": flags(case.is_valid),
        "block_table": rows(case.block_table),
        "block_size": case.block_size,
        "window_size": case.window_size,
        "token_offset": case.token_offset,
        "num_tokens": case.num_tokens,
    }


@adapter
def swa_indices_and_lens(case):
    indices, lens = vllm.swa_indices_and_lens(**swa_inputs(case))
    return {"indices": indices, "lens": lens}


@adapter
def swa_indices_and_lens_replay(case):
    indices, lens = vllm.swa_indices_and_lens(
        **swa_inputs(case), replay_start=i32(case.replay_start), index_width=case.index_width
    )
    return {"indices": indices, "lens": lens}


@adapter
def dspark_noncausal_swa_indices(case):
    indices, lens = vllm.dspark_noncausal_swa_indices(**swa_inputs(case), index_width=case.index_width)
    return {"indices": indices, "lens": lens}


@adapter
def prefill_gather_lens(case):
    lens = vllm.prefill_gather_lens(
        i32(case.seq_lens), i32(case.query_start_loc), case.num_prefills, case.num_decodes, case.window_size
    )
    return {"gather_lens": lens}


@adapter
def get_dspark_swa_index_width(case):
    return {"width": vllm.get_dspark_swa_index_width(case.window_size, case.num_speculative_tokens)}


@adapter
def get_prefill_chunk_plan(case):
    plan = vllm.get_prefill_chunk_plan(
        i32(case.prefill_seq_lens),
        i32(case.prefill_query_lens),
        window_size=case.window_size,
        max_model_len=case.max_model_len,
        max_num_batched_tokens=case.max_num_batched_tokens,
        compress_ratio=case.compress_ratio,
        prefill_chunk_size=case.prefill_chunk_size,
        has_compressed=case.has_compressed,
    )
    return {"plan": [list(chunk) for chunk in plan]}
