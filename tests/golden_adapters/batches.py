"""Batch splitting, chunks and prefill context parallelism."""

from types import SimpleNamespace

import torch

from cpkit.compat import vllm
from tests.golden_adapters.tensors import adapter, flags, i32, i64


def as_lists(slices):
    return [[rows.start, rows.stop, queries.start, queries.stop] for rows, queries in slices]


@adapter
def get_dcp_local_seq_lens(case):
    local = vllm.get_dcp_local_seq_lens(i32(case.seq_lens), case.dcp_world_size, None, case.interleave)
    for rank in range(case.dcp_world_size):
        one = vllm.get_dcp_local_seq_lens(i32(case.seq_lens), case.dcp_world_size, rank, case.interleave)
        assert torch.equal(one, local[..., rank])
    return {"local_lens": local}


@adapter
def split_decodes_and_prefills(case):
    batch = SimpleNamespace(
        query_start_loc_cpu=i32(case.query_start_loc),
        is_prefilling=flags(case.is_prefilling),
        num_reqs=case.num_reqs,
        num_actual_tokens=case.num_actual_tokens,
        max_query_len=case.max_query_len,
    )
    split = vllm.split_decodes_and_prefills(
        batch, case.decode_threshold, case.require_uniform, case.treat_short_extends_as_decodes
    )
    return {"result": list(split)}


@adapter
def request_row_bounds(case):
    return {"bounds": vllm.request_row_bounds(i64(case.req_idx))}


@adapter
def split_indexer_prefill_chunks(case):
    lens = i32(case.seq_lens), i32(case.query_lens)
    chunks = vllm.split_indexer_prefill_chunks(
        *lens, case.workspace_size, case.max_logits_bytes, request_offset=case.request_offset
    )
    return {"chunks": as_lists(chunks)}


@adapter
def split_pcp_dcp_prefill_chunks(case):
    chunks = vllm.split_pcp_dcp_prefill_chunks(
        i64(case.row_req_idx),
        i32(case.row_shard_rows),
        i32(case.row_query_lens),
        case.dcp_world_size,
        case.workspace_size,
        case.max_logits_bytes,
        request_offset=case.request_offset,
    )
    return {"chunks": as_lists(chunks)}


@adapter
def build_pcp_global_chunk_plan(case):
    plan = vllm.build_pcp_global_chunk_plan(
        i64(case.row_req_idx), i64(case.row_shard_rows), case.dcp_world_size, case.interleave
    )
    return vars(plan)


@adapter
def pcp_partition(case):
    part = vllm.pcp_partition(
        i32(case.num_scheduled_tokens),
        flags(case.is_prefilling),
        i64(case.global_slot_mapping),
        pcp_world_size=case.pcp_world_size,
        dcp_world_size=case.dcp_world_size,
        shard_decode_requests=case.shard_decode_requests,
        padded_num_tokens=case.padded_num_tokens,
    )
    return vars(part)


@adapter
def pcp_partition_batch(case):
    def rank_batch(rank):
        return vars(
            vllm.pcp_partition_batch(
                i32(case.num_scheduled_tokens),
                i32(case.num_computed_tokens),
                i32(case.prefill_len),
                i64(case.request_slots),
                i32(case.input_ids),
                pcp_rank=rank,
                pcp_world_size=case.pcp_world_size,
                dcp_world_size=case.dcp_world_size,
                interleave=case.interleave,
                shard_decode_requests=case.shard_decode_requests,
                graph_tokens=case.graph_tokens,
                graph_reqs=case.graph_reqs,
            )
        )

    return {"ranks": [result_or_refusal(rank_batch, rank) for rank in range(case.pcp_world_size)]}


def result_or_refusal(function, *args):
    try:
        return function(*args)
    except (AssertionError, IndexError, NotImplementedError, ValueError) as error:
        return error


@adapter
def token_to_req_indices(case):
    return {"token_to_req": vllm.token_to_req_indices(i32(case.query_start_loc), case.mapped_tokens, case.num_tokens)}
