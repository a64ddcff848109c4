"""The sliding-window metadata builder: token → row, validity, windows of decodes and prefills, tile schedules.

The window cache is replicated on every DCP rank, so nothing here goes through the DCP placement. Under PCP every copy
of a replicated row is computed, so that each has its slot in the batch's slot_mapping, whichever of them writes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cpkit.budget import Budget
from cpkit.builders.backend import choose_backend
from cpkit.builders.buffers import Buffer
from cpkit.builders.checks import check_fits, check_reach, check_update
from cpkit.builders.chip import Chip
from cpkit.builders.common import RankBatch
from cpkit.builders.graphs import GraphSupport
from cpkit.builders.swa_metadata import SwaDecode, SwaMetadata, SwaPrefill
from cpkit.builders.swa_schedule import ScheduleStage, layer_types
from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.checks import INT32_MAX
from cpkit.kernels.gather_lens import gather_lens
from cpkit.kernels.swa_indices import WindowTokens, draft_swa_indices, swa_indices
from cpkit.kernels.token_to_req import token_to_req
from cpkit.planner.order import BatchSplit, split_decodes_and_prefills
from cpkit.planner.slots import PAD
from cpkit.planner.window import draft_index_width


@dataclass(frozen=True, slots=True)
class SwaConfig:
    """Settings of a window cache and its builder. Raises ConfigError.

    block_size, num_blocks: of the window cache; its slots are int32. max_model_len: tokens.
    compress_ratios: of the layers that read the cache, 0 or 1 for those with the window alone; None: one such layer.
    index_topk: compressed keys that an indexer picks for ratios 2 and 4; None where it picks all.
    parallel_drafting: a draft model proposes all tokens at once, so that decodes reach 1 + 2x query tokens.
    draft_blocks: batches may be draft blocks, which are not causal.
    """

    budget: Budget
    chip: Chip
    window_size: int
    block_size: int
    num_blocks: int
    max_model_len: int
    compress_ratios: tuple[int, ...] | None = None
    index_topk: int | None = None
    parallel_drafting: bool = False
    draft_blocks: bool = False

    def __post_init__(self) -> None:
        for name in ("window_size", "block_size", "num_blocks", "max_model_len", "index_topk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: it must be at least 1")
        if self.num_blocks * self.block_size - 1 > INT32_MAX:
            raise ConfigError(
                f"{self.num_blocks} blocks of {self.block_size} keys: the attention kernels address a window cache "
                f"with int32 slots; use at most {(INT32_MAX + 1) // self.block_size} blocks"
            )
        layer_types(self.compress_ratios)

    @property
    def decode_threshold(self) -> int:
        """Longest query that still counts as a decode."""
        drafts = self.budget.num_speculative_tokens
        return 1 + (2 * drafts if self.parallel_drafting else drafts)

    @property
    def draft_width(self) -> int:
        """Index row of a draft block's token."""
        return draft_index_width(self.window_size, self.budget.num_speculative_tokens)


class SwaBuilder:
    """Builds SwaMetadata, step after step, into the same buffers: a step's result is valid until the next build.

    backend: of the kernels that it runs, "triton" or "torch"; None: the device's own (builders/backend.py).
    """

    graph_support = GraphSupport.UNIFORM

    def __init__(self, config: SwaConfig, *, device: torch.device | str = "cpu", backend: str | None = None) -> None:
        self.config = config
        self.device = torch.empty(0, device=device).device
        self.backend = choose_backend(backend, self.device)
        tokens, rows = config.budget.max_num_batched_tokens, config.budget.max_num_seqs
        width = max(config.window_size, config.draft_width if config.draft_blocks else 0)

        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> Buffer:
            return Buffer(f"window {name}", shape, dtype, self.device, fill=fill)

        self._token_to_req = buffer("token_to_req", tokens)
        self._is_valid = buffer("is_valid", tokens, dtype=torch.bool)
        self._decode_indices = buffer("decode indices", tokens * width, fill=PAD)
        self._decode_lens = buffer("decode lens", tokens)
        self._prefill_indices = buffer("prefill indices", tokens * config.window_size, fill=PAD)
        self._prefill_lens = buffer("prefill lens", tokens)
        self._gather_lens = buffer("gather lens", rows)
        self._query_lens = buffer("prefill query lens", rows)
        self._schedules = ScheduleStage(
            layer_types(config.compress_ratios) if config.chip.takes_window_schedules else (),
            config.block_size,
            config.index_topk,
            buffer("schedules", len(layer_types(config.compress_ratios)), config.chip.num_workers + 1, 2),
            self.backend,
        )

    def build(self, batch: RankBatch) -> SwaMetadata:
        """Metadata of a step; raises PlanError."""
        self.check(batch)
        split = split_decodes_and_prefills(
            batch.query_lens, threshold=self.config.decode_threshold, num_tokens=batch.num_tokens
        )
        self._check_draft_block(batch, split)
        tokens = self._tokens(batch)
        return SwaMetadata(
            split=split,
            token_to_req=tokens.token_to_req,
            is_valid=tokens.is_valid,
            decode=self._decode(tokens, split, causal=batch.causal),
            prefill=self._prefill(batch, split, tokens) if split.num_prefills else None,
            max_decode_query_len=min(batch.max_query_len, self.config.decode_threshold),
        )

    def update_drafts(self, metadata: SwaMetadata, batch: RankBatch) -> SwaMetadata:
        """The decode part rewritten in place from the batch's lengths and slots after a draft step.

        The mask stays what it was, causal or draft block. Without decodes nothing changes.
        """
        if not metadata.split.num_decodes:
            return metadata
        self.check(batch)
        check_update(batch, metadata.split)
        tokens = self._tokens(batch)
        decode = self._decode(tokens, metadata.split, causal=metadata.decode.causal)
        return replace(metadata, token_to_req=tokens.token_to_req, is_valid=tokens.is_valid, decode=decode)

    def check(self, batch: RankBatch) -> None:
        """Refuse a batch that the buffers, the block tables or the mask cannot hold."""
        check_fits(batch, self.config.budget, self.device)
        check_reach(batch, self.config.block_size)
        if not batch.causal and not self.config.draft_blocks:
            raise PlanError(
                "a batch that is not causal without draft blocks: only draft blocks see each other; set "
                "draft_blocks=True"
            )

    def _check_draft_block(self, batch: RankBatch, split: BatchSplit) -> None:
        longest = int(batch.query_lens[: split.num_decodes].max(initial=0))
        if not batch.causal and self.config.window_size + longest > self.config.draft_width:
            raise PlanError(
                f"a draft block of {longest} tokens sees {self.config.window_size + longest} keys, and its index rows "
                f"hold {self.config.draft_width}: num_speculative_tokens={self.config.budget.num_speculative_tokens} "
                "says how long draft blocks get"
            )

    def _tokens(self, batch: RankBatch) -> WindowTokens:
        """The batch's tokens with the row and validity of each."""
        row = self._token_to_req.front(batch.num_tokens)
        token_to_req(batch.query_start_loc, num_mapped=batch.num_real_tokens, out=row, backend=self.backend)
        valid = self._is_valid.front(batch.num_tokens)
        torch.ge(batch.slot_mapping[: batch.num_tokens], 0, out=valid)
        return WindowTokens(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            token_to_req=row,
            is_valid=valid,
            block_tables=batch.block_tables,
            block_size=self.config.block_size,
            replay_start=batch.replay_start,
            row_stride=batch.row_stride,
        )

    def _decode(self, tokens: WindowTokens, split: BatchSplit, *, causal: bool) -> SwaDecode:
        width = self.config.window_size if causal else self.config.draft_width
        indices = self._decode_indices.front_of_width(split.num_decode_tokens, width)
        lens = self._decode_lens.front(split.num_decode_tokens)
        self._windows(swa_indices if causal else draft_swa_indices, tokens, 0, indices, lens)
        return SwaDecode(indices, lens, causal, self._schedules.build(tokens, lens))

    def _windows(
        self,
        kernel: Callable[..., None],
        tokens: WindowTokens,
        first_token: int,
        indices: torch.Tensor,
        lens: torch.Tensor,
    ) -> None:
        """Windows of the tokens from first_token on, causal or of draft blocks as the kernel is."""
        kernel(
            tokens,
            window_size=self.config.window_size,
            token_offset=first_token,
            indices=indices,
            lens=lens,
            backend=self.backend,
        )

    def _prefill(self, batch: RankBatch, split: BatchSplit, tokens: WindowTokens) -> SwaPrefill:
        config, first = self.config, split.num_decodes
        indices = self._prefill_indices.front_of_width(split.num_prefill_tokens, config.window_size)
        lens = self._prefill_lens.front(split.num_prefill_tokens)
        self._windows(swa_indices, tokens, split.num_decode_tokens, indices, lens)
        loc = batch.query_start_loc[first:]
        gather = self._gather_lens.front(split.num_prefills)
        gather_lens(
            loc,
            batch.seq_lens[first:],
            window_size=config.window_size,
            replay_start=None if batch.replay_start is None else batch.replay_start[first:],
            row_stride=None if batch.row_stride is None else batch.row_stride[first:],
            out=gather,
            backend=self.backend,
        )
        query_lens = self._query_lens.front(split.num_prefills)
        torch.sub(loc[1:], loc[:-1], out=query_lens)
        return SwaPrefill(
            indices=indices,
            lens=lens,
            seq_lens=batch.seq_lens[first:],
            query_lens=query_lens,
            gather_lens=gather,
            max_seq_lens=batch.max_seq_lens[first:],
            host_query_lens=batch.query_lens[first:],
            window_size=config.window_size,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.budget.max_num_batched_tokens,
        )
