"""vLLM's planning functions and metadata builders, under its names, over cpkit's: tensors in, tensors out.

They reproduce upstream's results, its traps included; docs/compat.md says for each name where it differs from cpkit's
own, which refuses or computes what the trap gets wrong. No vLLM is imported.
"""

from cpkit.compat.batches import (
    get_dcp_local_seq_lens,
    request_row_bounds,
    split_decodes_and_prefills,
    split_indexer_prefill_chunks,
    split_pcp_dcp_prefill_chunks,
    token_to_req_indices,
)
from cpkit.compat.cache_builders import (
    DeepseekSparseSWAMetadata,
    DeepseekSparseSWAMetadataBuilder,
    KpoolTailMetadata,
    KpoolTailMetadataBuilder,
)
from cpkit.compat.indexer import (
    DecodeTensors,
    DeepseekV32IndexerPrefillChunkMetadata,
    VarlenDecodeTensors,
    build_prefill_chunk_metadata,
    dcp_localize_decode_seq_lens,
    indexer_decode_metadata_varlen,
    prepare_decode_tensors,
    prepare_global_decode_seq_lens,
)
from cpkit.compat.indexer_builder import (
    DeepSeekV32IndexerDecodeMetadata,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
    DeepseekV32IndexerPrefillMetadata,
)
from cpkit.compat.indexer_dtype import IndexerCacheConfig, dsa_indexer_uses_fp4
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
    "DeepSeekV32IndexerDecodeMetadata",
    "DeepseekSparseSWAMetadata",
    "DeepseekSparseSWAMetadataBuilder",
    "DeepseekV32IndexerMetadata",
    "DeepseekV32IndexerMetadataBuilder",
    "DeepseekV32IndexerPrefillChunkMetadata",
    "DeepseekV32IndexerPrefillMetadata",
    "IndexerCacheConfig",
    "KpoolTailMetadata",
    "KpoolTailMetadataBuilder",
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
