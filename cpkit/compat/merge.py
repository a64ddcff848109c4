"""Upstream's combination of DCP ranks: global top-k from local ones, and partial attention outputs by their LSE."""

import torch

from cpkit.errors import PlanError
from cpkit.kernels.dcp_local_lens import join_position
from cpkit.kernels.merge_lse import mask_empty_rows, merge_lse


def pack_dcp_topk(
    local_topk: torch.Tensor,
    local_logits: torch.Tensor,
    dcp_world_size: int,
    dcp_rank: int,
    cp_kv_cache_interleave_size: int,
    row_starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sends of its local selection: scores and global ids, both float32 [rows, K], -inf and -1 for padding.

    local_topk: [rows, K] int32, positions counted from row_starts (columns of local_logits, or None for 0), -1 padded.
    Ids travel as float32, as upstream's do: exact up to 2^24 only.
    """
    kept = local_topk >= 0
    local = local_topk.clamp(min=0).to(torch.int64)
    column = local if row_starts is None else local + row_starts.to(torch.int64)[:, None]
    scores = local_logits.to(torch.float32).gather(1, torch.where(kept, column, 0))
    ids = join_position(dcp_rank, local, dcp_world_size, cp_kv_cache_interleave_size)
    return scores.masked_fill(~kept, float("-inf")), ids.masked_fill(~kept, -1).to(torch.float32)


def merge_dcp_topk_global(packed_scores: torch.Tensor, packed_ids: torch.Tensor, topk: int) -> torch.Tensor:
    """[rows, topk] int32, the best ids of all ranks' candidates [W, rows, K], best first, -1 padded.

    Higher scores first, then smaller ids; +0.0 equals -0.0; a candidate of score -inf still ranks above padding.
    """
    scores = packed_scores.permute(1, 0, 2).flatten(1)
    ids = packed_ids.to(torch.int64).permute(1, 0, 2).flatten(1)
    order = torch.argsort(torch.where(ids < 0, torch.iinfo(torch.int64).max, ids), dim=1, stable=True)
    scores, ids = scores.gather(1, order) + 0.0, ids.gather(1, order)
    order = torch.argsort(scores, dim=1, descending=True, stable=True)  # ids ascend: padding stays behind equal scores
    return ids.gather(1, order)[:, :topk].to(torch.int32)


def lse_weighted_combine(
    outputs: torch.Tensor, lses: torch.Tensor, is_lse_base_on_e: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """One output [tokens, heads, dim] and LSE [tokens, heads], fp32, from those of shards [N, ...]; log base e, or 2.

    An LSE of nan or either infinity marks an empty shard, whose output may hold anything; only empty shards give output
    0 and LSE -inf.
    """
    return merge_lse(outputs.float().contiguous(), lses.float().contiguous(), base="e" if is_lse_base_on_e else "2")


def mask_dcp_empty_shards(
    lse: torch.Tensor, seq_lens: torch.Tensor | None, query_start_loc: torch.Tensor | None
) -> torch.Tensor:
    """lse [padded tokens, heads] with -inf in rows past the last query and of requests without keys on this rank.

    By request, as upstream: a draft token whose own context is empty here is not masked while its request's is not.
    seq_lens [num_reqs], this rank's, and query_start_loc [num_reqs + 1] come together or not at all, else ValueError.
    """
    if seq_lens is None and query_start_loc is None:
        return lse
    if seq_lens is None or query_start_loc is None:
        raise PlanError("seq_lens and query_start_loc come together: one of them is missing")
    if len(query_start_loc) != len(seq_lens) + 1:
        raise PlanError(f"query_start_loc has {len(query_start_loc)} entries for {len(seq_lens)} requests: one more")
    if not len(seq_lens):
        return torch.full_like(lse, float("-inf"))
    token = torch.arange(len(lse), device=lse.device)
    req = torch.searchsorted(query_start_loc[1:].contiguous(), token, right=True).clamp(max=len(seq_lens) - 1)
    return mask_empty_rows(lse, torch.where(token < query_start_loc[-1], seq_lens[req], 0))
