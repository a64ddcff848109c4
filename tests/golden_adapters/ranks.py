"""Combining the ranks of a DCP group."""

import torch

from cpkit.compat import vllm
from tests.golden_adapters.tensors import adapter, f32, i32


@adapter
def merge_dcp_topk_global(case):
    packed = [
        vllm.pack_dcp_topk(
            i32(case.local_topk[rank]),
            f32(case.local_logits[rank]),
            case.dcp_world_size,
            rank,
            case.interleave,
            None if case.row_starts is None else i32(case.row_starts[rank]),
        )
        for rank in range(case.dcp_world_size)
    ]
    scores = torch.stack([scores for scores, _ in packed])
    ids = torch.stack([ids for _, ids in packed])
    return {
        "packed_scores": scores,
        "packed_ids": ids.to(torch.int64),
        "merged": vllm.merge_dcp_topk_global(scores, ids, case.topk),
    }


@adapter
def lse_weighted_combine(case):
    combined, lse = vllm.lse_weighted_combine(f32(case.outputs), f32(case.lses), case.base_e)
    return {"combined": combined, "lse": lse}


@adapter
def mask_dcp_empty_shards(case):
    return {"masked": vllm.mask_dcp_empty_shards(f32(case.lse), i32(case.seq_lens), i32(case.query_start_loc))}
