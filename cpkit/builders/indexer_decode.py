"""The indexer's decode rows: which of the three kernels of a chip runs them, and what it takes.

per token    rows of one query token that name their request; any query lengths      (datacenter Blackwell)
flat         rows of one query token                                                 (no native width for 1 + x)
native       rows of one request, up to 1 + x query tokens
"""

from dataclasses import dataclass
from enum import Enum

import torch

from cpkit.budget import Budget
from cpkit.builders.buffers import Buffer
from cpkit.builders.chip import HOPPER, Chip
from cpkit.builders.common import RankBatch
from cpkit.builders.indexer_metadata import IndexerDecode
from cpkit.kernels.decode_lens import DecodeRows, flat_decodes, native_decodes
from cpkit.kernels.tile_schedule import tile_schedule
from cpkit.planner.order import BatchSplit
from cpkit.topology import Shard


class DecodePath(Enum):
    """How decodes become rows."""

    PER_TOKEN = "per token"
    FLAT = "flat"
    NATIVE = "native"


def fixed_path(chip: Chip, num_speculative_tokens: int, *, adaptive: bool) -> DecodePath | None:
    """The path of every step; None where the step's longest decode chooses between native and flat.

    adaptive: query lengths are decided on the device (adaptive verification), which Hopper's native rows cannot follow.
    """
    if chip.decodes_any_length:
        return DecodePath.PER_TOKEN
    if not chip.has_native_width(1 + num_speculative_tokens) or (adaptive and chip.family == HOPPER):
        return DecodePath.FLAT
    return None


def step_path(fixed: DecodePath | None, chip: Chip, longest: int) -> DecodePath:
    """The path of a step whose longest decode has `longest` query tokens."""
    if fixed is not None:
        return fixed
    return DecodePath.NATIVE if chip.has_native_width(longest) else DecodePath.FLAT


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBuffers:
    """Where decode rows live from step to step."""

    seq_lens: Buffer
    global_seq_lens: Buffer
    query_lens: Buffer
    req: Buffer
    block_tables: Buffer
    req_query_lens: Buffer
    schedule: Buffer


def decode_buffers(budget: Budget, max_blocks: int, num_workers: int, device: torch.device) -> DecodeBuffers:
    """Buffers for every step within the budget: rows are tokens with padding, or requests."""
    rows = max(budget.max_num_batched_tokens, budget.max_num_seqs)
    lens = max(rows, budget.max_num_seqs * budget.decode_threshold)

    def ints(name: str, *shape: int) -> Buffer:
        return Buffer(f"decode {name}", shape, torch.int32, device)

    return DecodeBuffers(
        seq_lens=ints("seq_lens", lens),
        global_seq_lens=ints("global_seq_lens", rows),
        query_lens=ints("query_lens", rows),
        req=ints("req", rows),
        block_tables=ints("block_tables", rows, max_blocks),
        req_query_lens=ints("req_query_lens", budget.max_num_seqs),
        schedule=ints("schedule", num_workers + 1, 2),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStage:
    """Builds the decode part; nothing is read back from the device, and every result has a fixed address."""

    shard: Shard
    chip: Chip
    compress_ratio: int
    states_per_block: int
    adaptive: bool
    fixed: DecodePath | None
    buffers: DecodeBuffers
    backend: str

    def build(self, batch: RankBatch, split: BatchSplit, block_tables: torch.Tensor) -> IndexerDecode:
        """Rows of the first split.num_decodes requests; block_tables: [num_rows, width] int32, in cache blocks."""
        query_lens = batch.query_lens[: split.num_decodes]
        longest, shortest = int(query_lens.max()), int(query_lens.min())
        path = step_path(self.fixed, self.chip, longest)
        native = path is DecodePath.NATIVE
        width = max(longest, 1) if native else 1
        num_rows = _native_rows(split, width) if native else split.num_decode_tokens
        rows = self.rows(num_rows, width, block_tables.shape[1])
        loc = batch.query_start_loc[: split.num_decodes + 1]
        (native_decodes if native else flat_decodes)(
            loc,
            batch.seq_lens[: split.num_decodes],
            block_tables[: split.num_decodes],
            self.shard,
            compress_ratio=self.compress_ratio,
            out=rows,
            backend=self.backend,
        )
        per_token = path is DecodePath.PER_TOKEN
        req_query_lens = self.buffers.req_query_lens.front(split.num_decodes)
        torch.sub(loc[1:], loc[:-1], out=req_query_lens)
        ragged = longest != shortest or (self.adaptive and split.num_decodes > 1)
        return IndexerDecode(
            block_tables=rows.block_tables,
            seq_lens=rows.seq_lens,
            query_lens=rows.query_lens,
            needs_packing=native and (ragged or num_rows * width != split.num_decode_tokens),
            req=rows.req if per_token else None,
            global_seq_lens=rows.global_seq_lens if self.shard.dcp_size > 1 else None,
            schedule=self.schedule(rows, per_token=per_token),
            req_query_lens=req_query_lens,
            is_uniform=longest == shortest,
            max_query_len=longest,
        )

    def rows(self, num_rows: int, width: int, table_width: int) -> DecodeRows:
        """The front of the buffers."""
        own = self.buffers
        return DecodeRows(
            seq_lens=own.seq_lens.front_of_width(num_rows, width),
            global_seq_lens=own.global_seq_lens.front(num_rows),
            query_lens=own.query_lens.front(num_rows),
            req=own.req.front(num_rows),
            block_tables=own.block_tables.corner(num_rows, table_width),
        )

    def schedule(self, rows: DecodeRows, *, per_token: bool) -> torch.Tensor:
        """Start of every worker, balanced by the keys that the longest token of each row sees."""
        out = self.buffers.schedule.tensor
        longest = rows.seq_lens[:, 0] if rows.seq_lens.shape[1] == 1 else rows.seq_lens.amax(1)
        req = rows.req if per_token else None
        tile_schedule(longest, tile=self.states_per_block, req=req, out=out, backend=self.backend)
        return out


def _native_rows(split: BatchSplit, width: int) -> int:
    """Rows of requests, and as many empty rows behind them as the padding tokens fill exactly."""
    rows, rest = divmod(split.num_decode_tokens, width)
    return max(split.num_decodes, rows if not rest else 0)
