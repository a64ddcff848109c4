"""What the sliding-window kernels take: per query token the slots of the keys it sees, decodes and prefills apart.

window_size=3, block_size=2; row 0 decodes position 3 (block table 5 3), row 1 prefills positions 0 1 (block table 8):

    token             0            | 1           2
    decode indices    11 6 7       | prefill     16 -1 -1    16 17 -1
    lens              3            |             1           2
"""

from dataclasses import dataclass

import torch

from cpkit.arrays import IntArray
from cpkit.planner.order import BatchSplit
from cpkit.planner.window import WorkspaceChunk, workspace_chunks


@dataclass(frozen=True, slots=True, eq=False)
class SwaDecode:
    """Windows of the decode tokens.

    indices: [num_decode_tokens, width] int32 slots, oldest first, then -1; lens: [num_decode_tokens] int32, keys of
    each. causal: False for draft blocks, whose tokens all see the window before the block and the whole block.
    schedules: by layer type, [num_workers + 1, 2] int32, start of each worker, one tile schedule shared by all layers
        of the type; empty without decode tokens, or where the chip's kernels take none.
    """

    indices: torch.Tensor
    lens: torch.Tensor
    causal: bool
    schedules: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class SwaPrefill:
    """Windows of the prefill tokens, always causal, and what their rows gather.

    indices: [num_prefill_tokens, window_size] int32; lens: [num_prefill_tokens] int32.
    seq_lens, query_lens, gather_lens: [num_prefills] int32, of each row: context, query tokens, recent keys to gather.
    max_seq_lens, host_query_lens: [num_prefills] int64 on the host, never below the device's.
    """

    indices: torch.Tensor
    lens: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: torch.Tensor
    gather_lens: torch.Tensor
    max_seq_lens: IntArray
    host_query_lens: IntArray
    window_size: int
    max_model_len: int
    max_num_batched_tokens: int

    def workspace_chunks(self, chunk_size: int, compress_ratio: int | None) -> list[WorkspaceChunk]:
        """Neighbouring rows that share a workspace of chunk_size rows of the largest kind; None: no compressed keys."""
        return workspace_chunks(
            self.max_seq_lens,
            self.host_query_lens,
            window_size=self.window_size,
            chunk_size=chunk_size,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            compress_ratio=compress_ratio,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SwaMetadata:
    """One step of one rank.

    token_to_req: [num_tokens] int32, row of each token (padding: 0); is_valid: [num_tokens] bool, the token has a slot.
    max_decode_query_len: query tokens a decode may have in this step.
    """

    split: BatchSplit
    token_to_req: torch.Tensor
    is_valid: torch.Tensor
    decode: SwaDecode
    prefill: SwaPrefill | None
    max_decode_query_len: int
