"""vLLM's planning functions, under its names, over cpkit's planner: tensors in, tensors out.

They reproduce upstream's results, its traps included; each function says where they differ from the planner's, which
refuses or computes what the trap gets wrong. No vLLM is imported.
"""

from cpkit.compat.batches import (
    get_dcp_local_seq_lens,
    request_row_bounds,
    split_decodes_and_prefills,
    split_indexer_prefill_chunks,
    split_pcp_dcp_prefill_chunks,
    token_to_req_indices,
)
from cpkit.compat.indexer import (
    DecodeTensors,
    DeepseekV32IndexerPrefillChunkMetadata,
    IndexerCacheConfig,
    VarlenDecodeTensors,
    build_prefill_chunk_metadata,
    dcp_localize_decode_seq_lens,
    dsa_indexer_uses_fp4,
    indexer_decode_metadata_varlen,
    prepare_decode_tensors,
    prepare_global_decode_seq_lens,
)
from cpkit.compat.merge import lse_weighted_combine, mask_dcp_empty_shards, merge_dcp_topk_global, pack_dcp_topk
from cpkit.compat.pcp import (
    PCPGlobalChunkPlan,
    PCPPartition,
    PCPRankBatch,
    build_pcp_global_chunk_plan,
    pcp_partition,
    pcp_partition_batch,
)
from cpkit.compat.slots import (
    compute_kpool_tail_slot_mapping,
    convert_req_index_to_global_slot,
    get_compressed_slot_mapping,
)
from cpkit.compat.swa import (
    dspark_noncausal_swa_indices,
    get_dspark_swa_index_width,
    get_prefill_chunk_plan,
    prefill_gather_lens,
    swa_indices_and_lens,
)

__all__ = [
    "DecodeTensors",
    "DeepseekV32IndexerPrefillChunkMetadata",
    "IndexerCacheConfig",
    "PCPGlobalChunkPlan",
    "PCPPartition",
    "PCPRankBatch",
    "VarlenDecodeTensors",
    "build_pcp_global_chunk_plan",
    "build_prefill_chunk_metadata",
    "compute_kpool_tail_slot_mapping",
    "convert_req_index_to_global_slot",
    "dcp_localize_decode_seq_lens",
    "dsa_indexer_uses_fp4",
    "dspark_noncausal_swa_indices",
    "get_compressed_slot_mapping",
    "get_dcp_local_seq_lens",
    "get_dspark_swa_index_width",
    "get_prefill_chunk_plan",
    "indexer_decode_metadata_varlen",
    "lse_weighted_combine",
    "mask_dcp_empty_shards",
    "merge_dcp_topk_global",
    "pack_dcp_topk",
    "pcp_partition",
    "pcp_partition_batch",
    "prefill_gather_lens",
    "prepare_decode_tensors",
    "prepare_global_decode_seq_lens",
    "request_row_bounds",
    "split_decodes_and_prefills",
    "split_indexer_prefill_chunks",
    "split_pcp_dcp_prefill_chunks",
    "swa_indices_and_lens",
    "token_to_req_indices",
]
