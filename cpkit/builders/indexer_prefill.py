"""The indexer's prefill chunks: which rows fit the workspace together, and what each query token may score.

Sizes come from host lengths, which may be above the device's: regions are laid out by them, and the ranges inside
follow the device. Ranks of a DCP group agree on every chunk, because all sizes are of whole requests.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cpkit.arrays import IntArray, prefix_sum
from cpkit.budget import Budget
from cpkit.builders.common import RankBatch
from cpkit.builders.indexer_metadata import IndexerChunk, IndexerPrefill
from cpkit.errors import PlanError
from cpkit.kernels.key_ranges import ChunkRows, KeyRanges, key_ranges_gathered, key_ranges_local
from cpkit.planner.chunks import Chunk, split_chunks, widen
from cpkit.planner.gather import GatherPlan, plan_gather
from cpkit.planner.interleave import keys_a_turn, largest_shard, local_lens
from cpkit.planner.order import request_row_bounds
from cpkit.planner.slots import as_int32
from cpkit.topology import Shard

WidenLens = Callable[[IntArray], IntArray]


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRows:
    """Prefill rows of a batch as the chunks see them, from row num_decodes on.

    num_keys: [rows] int64, keys of the row's context, which bound what it sees. shard_keys: [rows] int64, keys of the
    largest shard of the row's whole request. query_lens, largest_shares, req: [rows] int64.
    """

    first_row: int
    query_lens: IntArray
    num_keys: IntArray
    req: IntArray
    shard_keys: IntArray
    largest_shares: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Where the keys of a chunk's rows lie in the workspace, on the device."""

    start: torch.Tensor  # [rows] int64, first key of each row in the layout that is scored
    key_start_loc: torch.Tensor  # [rows + 1] int32
    local_key_start_loc: torch.Tensor  # [rows + 1] int32
    num_keys: int
    num_local_keys: int
    max_local_keys: int
    gather: GatherPlan | None


@dataclass(frozen=True, slots=True, eq=False)
class PrefillStage:
    """Builds the prefill part for one compress ratio. widen_lens: keys a row counts with in the budgets."""

    shard: Shard
    budget: Budget
    compress_ratio: int
    backend: str
    widen_lens: WidenLens | None = None

    @property
    def gathers(self) -> bool:
        """Keys of all ranks are gathered, and counted in token order."""
        return self.shard.pcp_size > 1 and self.shard.dcp_size > 1

    @property
    def turn(self) -> int:
        """Keys that a DCP rank keeps in a row."""
        return keys_a_turn(self.shard.interleave, self.compress_ratio, self.shard.dcp_size)

    def build(self, batch: RankBatch, num_decodes: int, block_tables: torch.Tensor) -> IndexerPrefill:
        """Chunks of the rows from num_decodes on; block_tables: [num_rows, width] int32, in cache blocks."""
        rows = self.rows(batch, num_decodes)
        return IndexerPrefill(
            chunks=tuple(one for chunk in self.split(rows) for one in self.runs(batch, rows, chunk, block_tables)),
            max_seq_len=int(batch.max_seq_lens[num_decodes:].max()),
        )

    def rows(self, batch: RankBatch, num_decodes: int) -> PrefillRows:
        """The prefill rows; rows of a dummy batch are requests of their own."""
        part, ratio = slice(num_decodes, None), self.compress_ratio
        query_lens, lens = batch.query_lens[part], batch.max_seq_lens[part]
        whole = batch.requests if self.gathers else None
        if whole is None:
            req, shares = np.arange(len(lens)), query_lens
            shard_lens = largest_shard(lens, self.shard.dcp_size, self.shard.interleave)
        else:
            req, shard_lens, shares = whole.req[part], whole.max_shard_lens[part], whole.largest_shares[part]
        bad = np.flatnonzero(lens > shard_lens * self.shard.dcp_size)
        if len(bad):
            i = int(bad[0])
            raise PlanError(
                f"prefill row {i} sees {int(lens[i])} tokens, but the largest shard of its request is "
                f"{int(shard_lens[i])} tokens on {self.shard.dcp_size} ranks: it is of the whole request, whose shards "
                "hold what any row sees"
            )
        return PrefillRows(num_decodes, query_lens, lens // ratio, req, shard_lens // ratio, shares)

    def split(self, rows: PrefillRows) -> list[Chunk]:
        """Chunks over the prefill rows; those without any key are left out."""
        bounds = request_row_bounds(rows.req) if self.gathers else np.arange(len(rows.req) + 1)
        first_row = bounds[:-1]
        _check_shares(rows, first_row)
        num_keys = rows.shard_keys[first_row] * self.shard.dcp_size if self.gathers else rows.num_keys
        counted = num_keys if self.widen_lens is None else self.widen_lens(num_keys)
        if len(counted) != len(num_keys) or (counted < num_keys).any():
            raise PlanError(f"widened lengths {counted.tolist()} of {num_keys.tolist()} keys: widening adds only")
        chunks = split_chunks(
            rows.largest_shares[first_row],
            counted,
            workspace_keys=self.budget.workspace_keys(self.compress_ratio),
            max_logits=self.budget.logits,
            span_unit=self.shard.dcp_size * self.turn,
        )
        return widen(list(_cut_to_keys(chunks, num_keys)), bounds)

    def runs(
        self, batch: RankBatch, rows: PrefillRows, chunk: Chunk, block_tables: torch.Tensor
    ) -> Iterator[IndexerChunk]:
        """One entry for each run of the chunk's query tokens, those behind this rank's last ones empty."""
        first, stop = rows.first_row + chunk.row_start, rows.first_row + chunk.row_stop
        chunk_token, last_token = (int(at) for at in batch.host_query_start_loc[[first, stop]])
        region = self.region(rows, chunk, block_tables.device)
        of_chunk = ChunkRows(
            query_start_loc=batch.query_start_loc[first : stop + 1],
            seq_lens=batch.seq_lens[first:stop],
            region_start=region.start,
            key_start_loc=region.key_start_loc,
            row_stride=None if batch.row_stride is None else batch.row_stride[first:stop],
        )
        row_of_key = torch.empty(region.num_keys, dtype=torch.int32, device=block_tables.device)
        for run_start, run_stop in chunk.runs():
            token_start, token_stop = min(chunk_token + run_start, last_token), min(chunk_token + run_stop, last_token)
            bounds = torch.empty(2, token_stop - token_start, dtype=torch.int32, device=block_tables.device)
            fills_workspace = run_start == 0
            ranges = KeyRanges(bounds[0], bounds[1], row_of_key if fills_workspace else row_of_key[:0])
            self.write_ranges(of_chunk, token_start, chunk, ranges)
            yield IndexerChunk(
                row_start=first,
                row_stop=stop,
                token_start=token_start,
                token_stop=token_stop,
                key_span=(chunk.key_start, chunk.key_stop),
                first_local=chunk.key_start // self.shard.dcp_size,
                key_start=ranges.key_start,
                key_end=ranges.key_end,
                key_start_loc=region.key_start_loc,
                local_key_start_loc=region.local_key_start_loc,
                key_rows=row_of_key,
                num_keys=region.num_keys,
                num_local_keys=region.num_local_keys,
                max_local_keys=region.max_local_keys,
                block_tables=block_tables[first:stop],
                gather=region.gather,
                fills_workspace=fills_workspace,
                last_span=chunk.last_span,
            )

    def region(self, rows: PrefillRows, chunk: Chunk, device: torch.device) -> Region:
        """Layout of a chunk's keys."""
        if self.gathers:
            plan = plan_gather(chunk, rows.req, rows.shard_keys, dcp_size=self.shard.dcp_size, interleave=self.turn)
            is_first = np.diff(plan.row_region, prepend=-1) > 0
            local = np.where(is_first, plan.shard_keys[plan.row_region], 0)
            start = plan.region_start()[plan.row_region]
            whole, ours, most = local * self.shard.dcp_size, local, int(local.sum())
        else:
            plan = None
            span = [np.minimum(rows.num_keys[chunk.row_start : chunk.row_stop], at) for at in _bounds(chunk)]
            whole, ours = span[1] - span[0], self.held(span, self.shard.dcp_rank)
            start, most = prefix_sum(ours)[:-1], int(self.held(span, 0).sum())
        key_start_loc = as_int32("keys of a prefill chunk", prefix_sum(whole))
        local_key_start_loc = as_int32("keys of a prefill chunk on one rank", prefix_sum(ours))
        return Region(
            start=_to(start, device),
            key_start_loc=_to(key_start_loc, device),
            local_key_start_loc=_to(local_key_start_loc, device),
            num_keys=int(key_start_loc[-1]),
            num_local_keys=int(local_key_start_loc[-1]),
            max_local_keys=most,
            gather=plan,
        )

    def held(self, span: list[IntArray], rank: int) -> IntArray:
        """[rows] int64, keys of each row in a span that a DCP rank stores."""
        start, stop = (local_lens(at, rank, self.shard.dcp_size, self.turn) for at in span)
        return stop - start

    def write_ranges(self, rows: ChunkRows, token_start: int, chunk: Chunk, out: KeyRanges) -> None:
        """Key ranges of the query tokens of one run, from token_start on."""
        if self.gathers:
            key_ranges_gathered(
                rows,
                token_start=token_start,
                compress_ratio=self.compress_ratio,
                span=_bounds(chunk),
                out=out,
                backend=self.backend,
            )
        else:
            key_ranges_local(
                rows,
                token_start=token_start,
                compress_ratio=self.compress_ratio,
                dcp_size=self.shard.dcp_size,
                dcp_rank=self.shard.dcp_rank,
                interleave=self.shard.interleave,
                span=_bounds(chunk),
                out=out,
                backend=self.backend,
            )


def _bounds(chunk: Chunk) -> tuple[int, int]:
    return chunk.key_start, chunk.key_stop


def _check_shares(rows: PrefillRows, first_row: IntArray) -> None:
    """Refuse largest shares that this rank's own share exceeds."""
    query_lens, shares = np.add.reduceat(rows.query_lens, first_row), rows.largest_shares[first_row]
    if (query_lens > shares).any():
        i = int(np.argmax(query_lens > shares))
        raise PlanError(
            f"request {int(rows.req[first_row[i]])} has {int(query_lens[i])} query tokens on this rank, but its "
            f"largest share on any rank is {int(shares[i])}: the runs of its chunks would leave tokens out"
        )


def _cut_to_keys(chunks: list[Chunk], num_keys: IntArray) -> Iterator[Chunk]:
    """Chunks over widened lengths as chunks over the keys that exist, without those that hold none."""
    for chunk in chunks:
        real = int(num_keys[chunk.row_start : chunk.row_stop].max())
        if chunk.key_start < real:
            stop = min(chunk.key_stop, real)
            yield replace(chunk, key_stop=stop, last_span=chunk.last_span or stop == real)


def _to(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A small host array on the device, without waiting for it."""
    return torch.from_numpy(array).to(device, non_blocking=True)
