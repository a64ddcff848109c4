"""What the indexer's kernels take: prefill chunks, decode rows, and the slots of the keys that a step writes.

dsa layers (ratio 1), rows 0 and 1 decode one token each, row 2 prefills 4 tokens of 6; the workspace holds 8 keys:

    decode      row 0     row 1                  prefill    token       2    3    4    5
    seq_lens    9         4                                 key range  0-3  0-4  0-5  0-6
"""

from dataclasses import dataclass

import torch

from cpkit.builders.backend import choose_backend
from cpkit.kernels.deinterleave import deinterleave_idx
from cpkit.planner.gather import GatherPlan
from cpkit.planner.order import BatchSplit


@dataclass(frozen=True, slots=True, eq=False)
class IndexerChunk:
    """Query tokens scored at once against the keys of one workspace filling; lengths and rows in keys (states).

    row_start, row_stop: rows of the batch. token_start, token_stop: flat tokens.
    key_span: the keys of a lone row that the workspace holds; from 0 on for whole rows. first_local: index in its shard
        of the first of them.
    key_start, key_end: [tokens] int32, workspace keys that each query token may score.
    key_start_loc: [rows + 1] int32, running keys of the rows over all ranks; local_key_start_loc: of this rank (under
        PCP + DCP: padded, equal on all ranks, and a request's first row counts for all its rows).
    key_rows: [num_keys] int32, row of the chunk that each key of key_start_loc belongs to.
    num_keys, num_local_keys, max_local_keys: totals, over all ranks, of this one, of the fullest.
    block_tables: [rows, width] int32, in cache blocks. gather: what token order is in the shards, under PCP + DCP.
    fills_workspace: the keys are gathered now; False for a later run of query tokens over the same keys. Equal on all
        ranks, whatever tokens they hold. last_span: the selection of these tokens is complete after this chunk.
    """

    row_start: int
    row_stop: int
    token_start: int
    token_stop: int
    key_span: tuple[int, int]
    first_local: int
    key_start: torch.Tensor
    key_end: torch.Tensor
    key_start_loc: torch.Tensor
    local_key_start_loc: torch.Tensor
    key_rows: torch.Tensor
    num_keys: int
    num_local_keys: int
    max_local_keys: int
    block_tables: torch.Tensor
    gather: GatherPlan | None
    fills_workspace: bool
    last_span: bool

    def deinterleave_idx(self) -> torch.Tensor:
        """[num_keys] int64, place of each key in the gathered buffer, for what does not apply the formula.

        Made anew by each call, on the backend of the device, whichever the builder runs.
        """
        assert self.gather is not None, "keys are gathered over ranks under PCP + DCP alone"
        device = self.key_start.device
        out = torch.empty(self.num_keys, dtype=torch.int64, device=device)
        local_start = torch.from_numpy(self.gather.local_start()).to(device, non_blocking=True)
        deinterleave_idx(
            local_start,
            dcp_size=self.gather.dcp_size,
            interleave=self.gather.interleave,
            out=out,
            backend=choose_backend(None, device),
        )
        return out


@dataclass(frozen=True, slots=True, eq=False)
class IndexerPrefill:
    """Chunks in order, spans outside and runs of query tokens inside; max_seq_len: longest prefill in tokens."""

    chunks: tuple[IndexerChunk, ...]
    max_seq_len: int


@dataclass(frozen=True, slots=True, eq=False)
class IndexerDecode:
    """Decode rows; every tensor but the last two has one leading size, and padding rows hold zeros.

    block_tables: [num_rows, width] int32, in cache blocks. query_lens: [num_rows] int32, query tokens of the row.
    seq_lens: [num_rows, tokens a row] int32, keys of this rank that each query token sees.
    needs_packing: the flat query tokens do not fill the rows one after another, and are packed by query_lens.
    req: [num_rows] int32, request of each row, where the kernel reads it, else None.
    global_seq_lens: [num_rows] int32, keys of all ranks that the row's last token sees; None without DCP.
    schedule: [num_workers + 1, 2] int32, start of each worker (kernels/tile_schedule.py).
    req_query_lens: [num_decodes] int32, query tokens of each decode. is_uniform: they are equal as the host knows them;
        max_query_len: the largest.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: torch.Tensor
    needs_packing: bool
    req: torch.Tensor | None
    global_seq_lens: torch.Tensor | None
    schedule: torch.Tensor
    req_query_lens: torch.Tensor
    is_uniform: bool
    max_query_len: int


@dataclass(frozen=True, slots=True, eq=False)
class IndexerMetadata:
    """One step of one rank.

    slot_mapping: int64, slot of the key that each token completes, -1 for none (PCP: gathered, rank after rank).
    """

    split: BatchSplit
    slot_mapping: torch.Tensor
    prefill: IndexerPrefill | None
    decode: IndexerDecode | None
