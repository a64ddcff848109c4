"""Upstream's window and kpool tail builders under their names."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from cpkit.builders.chip import Chip, chip_of
from cpkit.builders.graphs import GraphSupport
from cpkit.builders.swa import SwaBuilder, SwaConfig
from cpkit.builders.swa_metadata import SwaMetadata
from cpkit.compat.builder_config import CommonAttentionMetadata, read_batch, read_settings
from cpkit.compat.convert import RefusedAssertionError, refuse_as
from cpkit.compat.slots import compute_kpool_tail_slot_mapping


@dataclass
class DeepseekSparseSWAMetadata:
    """One step of the sliding-window layers, in upstream's names; prefill fields are None without prefills.

    tile_sched_*: schedule of a layer type's decode kernel, None where the type is absent or nothing decodes.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    token_to_req_indices: torch.Tensor
    is_valid_token: torch.Tensor
    decode_swa_indices: torch.Tensor
    decode_swa_lens: torch.Tensor
    decode_swa_width: int
    max_decode_query_len: int
    prefill_swa_indices: torch.Tensor | None
    prefill_swa_lens: torch.Tensor | None
    prefill_seq_lens: torch.Tensor | None
    prefill_query_lens: torch.Tensor | None
    prefill_gather_lens: torch.Tensor | None
    tile_sched_swaonly: torch.Tensor | None
    tile_sched_c2a: torch.Tensor | None
    tile_sched_c4a: torch.Tensor | None
    tile_sched_c128a: torch.Tensor | None


class DeepseekSparseSWAMetadataBuilder:
    """Upstream's builder of this name, over cpkit.builders.swa.

    kv_cache_spec: block_size and sliding_window. compress_ratios: of the model's layers. dspark: batches may be draft
    blocks; a non-causal batch without it raises AssertionError. A draft update keeps the mask, where upstream makes a
    draft block causal.
    """

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device | str,
        *,
        compress_ratios: tuple[int, ...] | None = None,
        dspark: bool = False,
        chip: Chip | None = None,
    ) -> None:
        settings = read_settings(vllm_config)
        self.layer_names = layer_names
        config = SwaConfig(
            budget=settings.budget,
            chip=chip_of(torch.empty(0, device=device).device) if chip is None else chip,
            window_size=kv_cache_spec.sliding_window,
            block_size=kv_cache_spec.block_size,
            num_blocks=(1 << 31) // kv_cache_spec.block_size,
            max_model_len=settings.max_model_len,
            compress_ratios=compress_ratios,
            parallel_drafting=settings.parallel_drafting,
            draft_blocks=dspark,
        )
        self.reorder_batch_threshold = config.decode_threshold
        self.graph_support = SwaBuilder.graph_support
        self._builder = SwaBuilder(config, device=device)
        self._built: SwaMetadata | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekSparseSWAMetadata:
        """Metadata of a step; the first and third argument are there for the signature's sake."""
        with refuse_as(RefusedAssertionError):
            self._built = self._builder.build(read_batch(common_attn_metadata))
        return _swa_metadata(self._built)

    def update_draft_metadata(
        self, metadata: DeepseekSparseSWAMetadata, common_attn_metadata: CommonAttentionMetadata
    ) -> None:
        """Rewrite the decode part of the last build's metadata in place, after the batch's lengths moved on."""
        assert self._built is not None, "a draft update follows a build"
        self._built = self._builder.update_drafts(self._built, read_batch(common_attn_metadata))
        fresh = _swa_metadata(self._built)
        for field in fields(fresh):
            setattr(metadata, field.name, getattr(fresh, field.name))


def _swa_metadata(built: SwaMetadata) -> DeepseekSparseSWAMetadata:
    prefill, schedules = built.prefill, built.decode.schedules
    return DeepseekSparseSWAMetadata(
        *built.split,
        token_to_req_indices=built.token_to_req,
        is_valid_token=built.is_valid,
        decode_swa_indices=built.decode.indices,
        decode_swa_lens=built.decode.lens,
        decode_swa_width=built.decode.indices.shape[1],
        max_decode_query_len=built.max_decode_query_len,
        prefill_swa_indices=None if prefill is None else prefill.indices,
        prefill_swa_lens=None if prefill is None else prefill.lens,
        prefill_seq_lens=None if prefill is None else prefill.seq_lens,
        prefill_query_lens=None if prefill is None else prefill.query_lens,
        prefill_gather_lens=None if prefill is None else prefill.gather_lens,
        tile_sched_swaonly=schedules.get("swaonly"),
        tile_sched_c2a=schedules.get("c2a"),
        tile_sched_c4a=schedules.get("c4a"),
        tile_sched_c128a=schedules.get("c128a"),
    )


@dataclass
class KpoolTailMetadata:
    """One step of the kpool tail cache: the slot that each token writes."""

    slot_mapping: torch.Tensor


class KpoolTailMetadataBuilder:
    """Upstream's builder of this name. kv_cache_spec: block_size, rows of a tail block.

    Padding that num_actual_tokens counts is mapped like a token of the last request, as upstream does; cpkit's builder
    keeps its -1.
    """

    supports_update_block_table = False
    graph_support = GraphSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device | str
    ) -> None:
        self.layer_names = layer_names
        self.kpool = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KpoolTailMetadata:
        """Tail slots of a step; the first and third argument are there for the signature's sake."""
        batch = common_attn_metadata
        slots = compute_kpool_tail_slot_mapping(
            batch.slot_mapping,
            batch.block_table_tensor,
            batch.query_start_loc,
            getattr(batch, "positions", None),
            batch.num_actual_tokens,
            batch.num_reqs,
            self.kpool,
        )
        return KpoolTailMetadata(slots)
