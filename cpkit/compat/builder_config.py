"""What upstream's builders are given: settings of the engine, the cache's spec, and the batch, as plain objects.

Only the attributes named here are read, so any object that has them will do; no vLLM is imported.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cpkit.arrays import IntArray
from cpkit.budget import Budget
from cpkit.builders.common import RankBatch
from cpkit.compat import batches
from cpkit.compat.convert import flags, ints

DEFAULT_LOGITS_BYTES = 512 << 20
WORKSPACE_MODEL_LENS = 40


class CommonAttentionMetadata(batches.CommonAttentionMetadata, Protocol):
    """The fields of upstream's class of this name that the builders read.

    seq_lens_cpu may be above the device's lengths. These may be missing: req_idx, shard_rows: [rows] int64 on the host,
    under PCP; positions: [tokens] int64; causal (default True).
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings read from a vllm_config."""

    budget: Budget
    max_model_len: int
    parallel_drafting: bool
    dcp_size: int
    pcp_size: int
    interleave: int


def read_settings(
    vllm_config: Any, *, compress_ratio: int = 1, workspace_size: int | None = None, max_logits_bytes: int | None = None
) -> EngineSettings:
    """Settings from scheduler_config, model_config, speculative_config (may be None) and parallel_config.

    workspace_size: states of a prefill chunk (default: 40 times the largest model length, in tokens).
    """
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    drafts = vllm_config.speculative_config
    max_model_len = int(vllm_config.model_config.max_model_len)
    if workspace_size is None:
        workspace_tokens = WORKSPACE_MODEL_LENS * max_model_len
    else:
        workspace_tokens = workspace_size * compress_ratio
    budget = Budget(
        workspace_tokens=workspace_tokens,
        logits_bytes=DEFAULT_LOGITS_BYTES if max_logits_bytes is None else max_logits_bytes,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        num_speculative_tokens=0 if drafts is None else drafts.num_speculative_tokens,
    )
    return EngineSettings(
        budget=budget,
        max_model_len=max_model_len,
        parallel_drafting=bool(getattr(drafts, "parallel_drafting", False)),
        dcp_size=getattr(parallel, "decode_context_parallel_size", 1),
        pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        interleave=getattr(parallel, "cp_kv_cache_interleave_size", 1),
    )


def read_batch(batch: CommonAttentionMetadata) -> RankBatch:
    """The batch as cpkit's builders take it."""
    num_reqs, prefilling = batch.num_reqs, batch.is_prefilling
    return RankBatch(
        query_start_loc=batch.query_start_loc[: num_reqs + 1],
        seq_lens=batch.seq_lens[:num_reqs],
        block_tables=batch.block_table_tensor[:num_reqs],
        slot_mapping=batch.slot_mapping,
        host_query_start_loc=ints(batch.query_start_loc_cpu)[: num_reqs + 1],
        max_seq_lens=ints(batch.seq_lens_cpu)[:num_reqs],
        num_tokens=batch.num_actual_tokens,
        is_prefilling=None if prefilling is None else flags(prefilling)[:num_reqs],
        causal=getattr(batch, "causal", True),
        positions=getattr(batch, "positions", None),
    )


def host_lens(batch: CommonAttentionMetadata) -> tuple[IntArray, IntArray]:
    """Query boundaries and context lengths that the host knows, int64."""
    return ints(batch.query_start_loc_cpu)[: batch.num_reqs + 1], ints(batch.seq_lens_cpu)[: batch.num_reqs]
