"""The metadata builders' whole builds."""

from types import SimpleNamespace

import torch

from cpkit.builders.chip import Chip
from cpkit.compat import vllm
from tests.golden_adapters.tensors import adapter, flags, i32, i64, rows


def batch(case):
    loc, lens = i32(case.query_start_loc), i32(case.seq_lens)
    return SimpleNamespace(
        query_start_loc=loc,
        query_start_loc_cpu=loc,
        seq_lens=lens.clone(),
        seq_lens_cpu=lens,
        num_reqs=len(lens),
        num_actual_tokens=case.num_actual_tokens,
        max_query_len=int((loc[1:] - loc[:-1]).max()),
        block_table_tensor=rows(case.block_table),
        slot_mapping=i64(case.slot_mapping),
        is_prefilling=None,
    )


def engine(config, num_rows, **drafting):
    drafts = (
        None if config["num_spec"] is None else SimpleNamespace(num_speculative_tokens=config["num_spec"], **drafting)
    )
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=config["max_tokens"], max_num_seqs=num_rows),
        model_config=SimpleNamespace(max_model_len=config.get("max_model_len", 512)),
        speculative_config=drafts,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=config.get("dcp_world_size", 1),
            prefill_context_parallel_size=config.get("pcp_world_size", 1),
            cp_kv_cache_interleave_size=config.get("interleave", 1),
        ),
    )


@adapter
def indexer_build(case):
    config = case.config
    chip = Chip("cuda", family=100 if config["varlen"] else 80, num_workers=4)

    def on_rank(rank):
        builder = vllm.DeepseekV32IndexerMetadataBuilder(
            SimpleNamespace(block_size=config["block_size"], compress_ratio=config["compress_ratio"]),
            ["layer"],
            engine(config, len(case.seq_lens)),
            "cpu",
            kernel_block_size=config["kernel_block_size"],
            dcp_rank=rank,
            chip=chip,
            adaptive=config["adaptive"],
            workspace_size=config["workspace_size"],
            max_logits_bytes=config["max_logits_bytes"],
        )
        step = batch(case)
        step.is_prefilling, step.req_idx, step.shard_rows = (
            flags(case.is_prefilling),
            i64(case.req_idx),
            i64(case.shard_rows),
        )
        built = builder.build(0, step)
        return {
            "counts": [built.num_decodes, built.num_prefills, built.num_decode_tokens, built.num_prefill_tokens],
            "slot_mapping": built.slot_mapping,
            "prefill": None
            if built.prefill is None
            else {
                "max_prefill_seq_len": built.prefill.max_prefill_seq_len,
                "chunks": [chunk_fields(chunk) for chunk in built.prefill.chunks],
            },
            "decode": None if built.decode is None else decode_fields(built.decode),
        }

    return {"rank_results": [on_rank(rank) for rank in range(config["dcp_world_size"])]}


def chunk_fields(chunk):
    found = dict(vars(chunk), skip_gather=chunk.skip_kv_gather)
    plan = found.pop("pcp_plan")
    del found["skip_kv_gather"], found["max_seqlen_k"]
    return {**found, "deinterleave_idx": None if plan is None else plan.deinterleave_idx}


def decode_fields(decode):
    found = dict(vars(decode))
    schedule = found.pop("schedule_metadata")
    assert schedule.dtype == torch.int32 and schedule.shape[1] == 2
    return found


@adapter
def swa_build(case):
    config = case.config
    builder = vllm.DeepseekSparseSWAMetadataBuilder(
        SimpleNamespace(block_size=config["block_size"], sliding_window=config["window_size"]),
        ["layer"],
        engine(config, len(case.seq_lens), parallel_drafting=config["parallel_drafting"]),
        "cpu",
        compress_ratios=tuple(config["compress_ratios"]),
        dspark=config["dspark"],
    )
    step = batch(case)
    step.causal = case.causal
    built = builder.build(0, step)
    types = ("c128a", "c2a", "c4a", "swaonly")
    found = {
        "counts": [built.num_decodes, built.num_prefills, built.num_decode_tokens, built.num_prefill_tokens],
        "decode_threshold": builder.reorder_batch_threshold,
        "token_to_req": built.token_to_req_indices,
        "is_valid": built.is_valid_token,
        "decode_indices": built.decode_swa_indices.clone(),
        "decode_lens": built.decode_swa_lens.clone(),
        "decode_width": built.decode_swa_width,
        "prefill_indices": built.prefill_swa_indices,
        "prefill_lens": built.prefill_swa_lens,
        "max_decode_query_len": built.max_decode_query_len,
        "plan_layers": [name for name in types if getattr(built, f"tile_sched_{name}") is not None],
        "prefill_seq_lens": built.prefill_seq_lens,
        "prefill_gather_lens": built.prefill_gather_lens,
        "prefill_query_lens": built.prefill_query_lens,
        "update": None,
    }
    if case.draft_seq_lens is not None:
        step.seq_lens.copy_(i32(case.draft_seq_lens))
        builder.update_draft_metadata(built, step)
        found["update"] = {"decode_indices": built.decode_swa_indices, "decode_lens": built.decode_swa_lens}
    return found
