"""Upstream's indexer builder, step by step over compat's functions, so that its traps show in its results too.

cpkit.builders.indexer differs where those functions say so: lengths stay at or above 0, ragged rows are packed from the
left, padding rows are zero in full, lone long requests are cut into key spans, and DCP works with compressed keys.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cpkit.arrays import IntArray
from cpkit.builders.backend import choose_backend
from cpkit.builders.chip import Chip, chip_of
from cpkit.builders.common import GatherSlots
from cpkit.builders.graphs import GraphSupport
from cpkit.builders.indexer_decode import DecodePath, fixed_path, step_path
from cpkit.compat.batches import (
    get_dcp_local_seq_lens,
    split_decodes_and_prefills,
    split_indexer_prefill_chunks,
    split_pcp_dcp_prefill_chunks,
)
from cpkit.compat.builder_config import CommonAttentionMetadata, host_lens, read_settings
from cpkit.compat.convert import int32, int64
from cpkit.compat.indexer import (
    DeepseekV32IndexerPrefillChunkMetadata,
    build_prefill_chunk_metadata,
    dcp_localize_decode_seq_lens,
    indexer_decode_metadata_varlen,
    prepare_decode_tensors,
    prepare_global_decode_seq_lens,
)
from cpkit.compat.pcp import build_pcp_global_chunk_plan
from cpkit.compat.slots import get_compressed_slot_mapping
from cpkit.errors import ConfigError
from cpkit.kernels.tile_schedule import tile_schedule
from cpkit.planner.slots import PAD


class RefusedFeatureError(ConfigError, NotImplementedError):
    """Refused by upstream with NotImplementedError, the type its vectors name; to users of cpkit a ConfigError."""


@dataclass
class DeepseekV32IndexerPrefillMetadata:
    """Prefill chunks; max_prefill_seq_len in tokens, also for compressed keys."""

    chunks: list[DeepseekV32IndexerPrefillChunkMetadata]
    max_prefill_seq_len: int


@dataclass
class DeepSeekV32IndexerDecodeMetadata:
    """Decode rows in upstream's names; seq_lens: [rows, tokens a row] int32, in states.

    per_req_decode_lens: [num_decodes] int32; indices: [rows] int32, request of each row, for per-token kernels alone.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    decode_lens: torch.Tensor
    requires_padding: bool
    schedule_metadata: torch.Tensor
    global_seq_lens: torch.Tensor | None
    per_req_decode_lens: torch.Tensor
    decode_is_uniform: bool
    write_max_decode_len: int
    indices: torch.Tensor | None


@dataclass
class DeepseekV32IndexerMetadata:
    """One step, in upstream's names."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    slot_mapping: torch.Tensor
    prefill: DeepseekV32IndexerPrefillMetadata | None
    decode: DeepSeekV32IndexerDecodeMetadata | None


class DeepseekV32IndexerMetadataBuilder:
    """Upstream's builder of this name.

    kv_cache_spec: block_size (tokens) and, if compressed, compress_ratio. kernel_block_size: tokens of a block table
    entry. dcp_rank, pcp_rank, comm, chip: what upstream asks its process groups and platform. adaptive: query lengths
    are decided on the device. workspace_size: states of a chunk. DCP with compressed keys: NotImplementedError.
    """

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device | str,
        *,
        kernel_block_size: int | None = None,
        dcp_rank: int = 0,
        pcp_rank: int = 0,
        gather_slots: GatherSlots | None = None,
        chip: Chip | None = None,
        adaptive: bool = False,
        workspace_size: int | None = None,
        max_logits_bytes: int | None = None,
    ) -> None:
        self.layer_names = layer_names
        self.device = torch.empty(0, device=device).device
        self.compress_ratio = getattr(kv_cache_spec, "compress_ratio", 1)
        self.settings = read_settings(
            vllm_config,
            compress_ratio=self.compress_ratio,
            workspace_size=workspace_size,
            max_logits_bytes=max_logits_bytes,
        )
        if self.settings.dcp_size > 1 and self.compress_ratio > 1:
            raise RefusedFeatureError(
                f"dcp={self.settings.dcp_size} with compress_ratio={self.compress_ratio}: upstream has no such path; "
                "cpkit.builders.indexer has"
            )
        self.dcp_rank, self.pcp_rank, self.gather_slots = dcp_rank, pcp_rank, gather_slots
        self.chip = chip_of(self.device) if chip is None else chip
        self.adaptive = adaptive
        self.block_size = kv_cache_spec.block_size
        self.states_per_block = self.block_size // self.compress_ratio
        entry = self.block_size if kernel_block_size is None else kernel_block_size
        divides = self.compress_ratio > 1 and self.block_size % entry == 0
        self.entries_per_block = self.block_size // entry if divides else 1
        self.path = fixed_path(self.chip, self.settings.budget.num_speculative_tokens, adaptive=adaptive)
        self.graph_support = GraphSupport.UNIFORM if self.path is None else GraphSupport.ALWAYS
        budget = self.settings.budget
        room = max(budget.max_num_batched_tokens, budget.max_num_seqs * budget.decode_threshold)
        self.seq_lens_buffer = torch.zeros(room, dtype=torch.int32, device=self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV32IndexerMetadata:
        """Metadata of a step; the first and third argument are there for the signature's sake."""
        batch = common_attn_metadata
        tables = batch.block_table_tensor[: batch.num_reqs]
        if self.entries_per_block > 1:
            tables = tables[:, :: self.entries_per_block] // self.entries_per_block
        slots = self._slots(batch, tables)
        if not batch.num_actual_tokens:
            return DeepseekV32IndexerMetadata(0, 0, 0, 0, slots, None, None)
        counts = split_decodes_and_prefills(
            batch,
            decode_threshold=self.settings.budget.decode_threshold,
            require_uniform=self.path is None,
            treat_short_extends_as_decodes=self.settings.pcp_size == 1,
        )
        return DeepseekV32IndexerMetadata(
            *counts,
            slot_mapping=slots,
            prefill=self._prefill(batch, tables, counts[0]) if counts[1] else None,
            decode=self._decode(batch, tables, counts[0], counts[2]) if counts[0] else None,
        )

    def _slots(self, batch: CommonAttentionMetadata, tables: torch.Tensor) -> torch.Tensor:
        """The batch's slots, or those of its states (PCP: every rank's padded segment, gathered)."""
        if self.compress_ratio == 1:
            return batch.slot_mapping
        pcp_size = self.settings.pcp_size
        padded = len(batch.slot_mapping) // pcp_size if pcp_size > 1 else batch.num_actual_tokens
        segment = batch.slot_mapping[self.pcp_rank * padded :][:padded]
        own = torch.full((padded,), PAD, dtype=torch.int64, device=self.device)
        get_compressed_slot_mapping(
            padded,
            segment,
            batch.query_start_loc[: batch.num_reqs + 1],
            batch.seq_lens[: batch.num_reqs],
            tables,
            self.states_per_block,
            self.compress_ratio,
            out=own,
        )
        if pcp_size == 1:
            return own
        if self.gather_slots is None:
            raise ConfigError(
                f"pcp_size={pcp_size} with compressed keys and no gather_slots: slots are gathered over the ranks"
            )
        return self.gather_slots(own)

    def _prefill(
        self, batch: CommonAttentionMetadata, tables: torch.Tensor, first: int
    ) -> DeepseekV32IndexerPrefillMetadata:
        loc, lens = host_lens(batch)
        states, query_lens = lens // self.compress_ratio, np.diff(loc)
        dcp_size, budget = self.settings.dcp_size, self.settings.budget
        limits = budget.workspace_keys(self.compress_ratio), budget.logits_bytes
        gathers = dcp_size > 1 and self.settings.pcp_size > 1
        if gathers:
            req, shard_rows = self._requests(batch, lens)
            slices = split_pcp_dcp_prefill_chunks(
                req[first:], shard_rows[first:], int32(query_lens[first:]), dcp_size, *limits, request_offset=first
            )
        else:
            slices = split_indexer_prefill_chunks(
                int32(states[first:]), int32(query_lens[first:]), *limits, request_offset=first
            )
        chunks = []
        for rows, queries in slices:
            plan = None
            if gathers:
                plan = build_pcp_global_chunk_plan(req[rows], shard_rows[rows], dcp_size, self.settings.interleave)
            chunk = build_prefill_chunk_metadata(
                rows.start,
                rows.stop,
                batch.query_start_loc_cpu,
                batch.seq_lens_cpu,
                tables,
                self.compress_ratio,
                queries,
                dcp_rank=self.dcp_rank,
                dcp_world_size=dcp_size,
                cp_kv_cache_interleave_size=self.settings.interleave,
                pcp_plan=plan,
            )
            if chunk is not None:
                chunks.append(chunk)
        return DeepseekV32IndexerPrefillMetadata(chunks, int(lens[first:].max()))

    def _requests(self, batch: CommonAttentionMetadata, lens: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Request and largest shard of each row; without a map every row is a request of its own."""
        req: torch.Tensor | None = getattr(batch, "req_idx", None)
        if req is None:
            shards = get_dcp_local_seq_lens(int64(lens), self.settings.dcp_size, 0, self.settings.interleave)
            return torch.arange(batch.num_reqs), shards.long()
        shard_rows: torch.Tensor = batch.shard_rows  # type: ignore[attr-defined]  # comes with req_idx
        return req, shard_rows

    def _decode(
        self, batch: CommonAttentionMetadata, tables: torch.Tensor, num_decodes: int, num_tokens: int
    ) -> DeepSeekV32IndexerDecodeMetadata:
        query_lens = np.diff(host_lens(batch)[0])[:num_decodes]
        longest = int(query_lens.max())
        path = step_path(self.path, self.chip, longest)
        native, decode_lens = path is DecodePath.NATIVE, int32(query_lens, batch.seq_lens)
        next_n = self.settings.budget.decode_threshold
        lens, tables, indices = batch.seq_lens[:num_decodes], tables[:num_decodes], None
        if path is DecodePath.PER_TOKEN:
            per_token = indexer_decode_metadata_varlen(
                batch.query_start_loc, lens, tables, num_decodes, num_tokens, self.seq_lens_buffer
            )
            rows, row_lens, row_tables = per_token.seq_lens[:num_tokens], per_token.decode_lens, per_token.block_table
            padding, indices = False, per_token.indices
        else:
            expanded = prepare_decode_tensors(
                lens,
                tables,
                decode_lens,
                num_tokens,
                use_native=native,
                next_n=next_n,
                adaptive=self.adaptive,
                seq_lens_buffer=self.seq_lens_buffer,
            )
            rows, row_lens, row_tables = expanded.seq_lens, expanded.decode_lens, expanded.block_table
            padding = expanded.requires_padding
        dcp_size, global_lens = self.settings.dcp_size, None
        if dcp_size > 1:
            global_lens = prepare_global_decode_seq_lens(lens, decode_lens, num_tokens, native)
            rows = dcp_localize_decode_seq_lens(rows, dcp_size, self.dcp_rank, self.settings.interleave)
        if self.compress_ratio > 1:
            rows = rows // self.compress_ratio
            if native and next_n == 1:  # upstream fills these lengths up to the graph's rows, and nothing beside them
                rows = torch.nn.functional.pad(rows, (0, num_tokens - num_decodes))
        rows = rows[:, None] if rows.dim() == 1 else rows
        schedule = torch.empty(self.chip.num_workers + 1, 2, dtype=torch.int32, device=self.device)
        backend = choose_backend(None, self.device)
        tile_schedule(rows.amax(1).int(), tile=self.states_per_block, req=indices, out=schedule, backend=backend)
        return DeepSeekV32IndexerDecodeMetadata(
            block_table=row_tables,
            seq_lens=rows,
            decode_lens=row_lens,
            requires_padding=padding,
            schedule_metadata=schedule,
            global_seq_lens=global_lens,
            per_req_decode_lens=decode_lens,
            decode_is_uniform=longest == int(query_lens.min()),
            write_max_decode_len=longest,
            indices=indices,
        )
