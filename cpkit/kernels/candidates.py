"""Global top-k under DCP: each rank's best keys travel as (score, position), and the best of all are the answer.

dcp_size=2, interleave=1, k=2, one query token; the keys' scores are 5 9 5 1 (positions 0 1 2 3):

    rank 0 holds 0 2    local top-k 0 1      candidates (5, 0) (5, 2)
    rank 1 holds 1 3    local top-k 0 1      candidates (9, 1) (1, 3)
    global                                   (9, 1) (5, 0)          equal scores: the lower position

Exact, since a globally best key is among its owner's k best. The order of keys: higher score first, then lower
position; -0.0 equals +0.0; NaN is never chosen; -inf at a real position comes before padding (-inf at position -1).

Score fp32, position int64; 12 bytes when packed, whatever the position: nothing passes through a float.
"""

from dataclasses import dataclass

import torch

from cpkit.errors import PlanError
from cpkit.kernels.backends import check_backend
from cpkit.kernels.checks import INTS, check_positive, check_shard, check_tensor
from cpkit.kernels.dcp_local_lens import join_position
from cpkit.kernels.paged_rows import bytes_as
from cpkit.planner.collectives import CANDIDATE_BYTES
from cpkit.planner.slots import PAD

SCORE_BYTES = 4
LAST_POSITION = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """Which key of its request lies at each place of a row of logits, counted from the row's first key.

    dcp_size=2, interleave=1, first_key=1:    place            0 1 2
                                              token_order      1 2 3
                                              shard of rank 1  3 5 7      its key 1 on

    interleave in keys.
    """

    dcp_size: int
    dcp_rank: int
    interleave: int
    first_key: int = 0


def token_order(first_key: int) -> KeyOrder:
    """Keys of all shards, one after the other, from key first_key of the request on."""
    return KeyOrder(dcp_size=1, dcp_rank=0, interleave=1, first_key=first_key)


def local_candidates_reference(
    topk_indices: torch.Tensor, logits: torch.Tensor, key_start: torch.Tensor, order: KeyOrder
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = topk_indices >= 0
    index = topk_indices.long().clamp(min=0)
    column = torch.where(kept, key_start.long()[:, None] + index, 0)
    scores = logits.gather(1, column) if logits.shape[1] else logits.new_zeros(column.shape)
    return scores.masked_fill(~kept, float("-inf")), global_positions(topk_indices, order)


def global_positions(topk_indices: torch.Tensor, order: KeyOrder) -> torch.Tensor:
    """int64, of a rank's own best keys, counted from the row's first key; -1 for none."""
    index = order.first_key + topk_indices.long().clamp(min=0)
    positions = join_position(order.dcp_rank, index, order.dcp_size, order.interleave)
    return positions.masked_fill(topk_indices < 0, PAD)


def local_candidates(
    topk_indices: torch.Tensor, logits: torch.Tensor, key_start: torch.Tensor, order: KeyOrder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and global positions, fp32 and int64 [num_tokens, k], of a rank's own best keys.

    topk_indices: [num_tokens, k] int32 or int64, counted from key_start, -1 for none. logits: [num_tokens, keys] fp32;
    key_start: [num_tokens] int32 or int64, the column of each token's first key.
    """
    check_found(topk_indices, logits, key_start, order)
    return local_candidates_reference(topk_indices, logits, key_start, order)


def check_found(topk_indices: torch.Tensor, logits: torch.Tensor, key_start: torch.Tensor, order: KeyOrder) -> None:
    """Raise PlanError unless the arguments of local_candidates fit each other."""
    check_shard(order.dcp_size, order.dcp_rank, order.interleave)
    num_tokens, device = topk_indices.shape[0], topk_indices.device
    check_tensor("topk_indices", topk_indices, INTS, (num_tokens, None), device)
    check_tensor("logits", logits, torch.float32, (num_tokens, None), device)
    check_tensor("key_start", key_start, INTS, (num_tokens,), device)


def pack_candidates(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[num_tokens, k, 12] uint8, the bytes of each score, then of its position."""
    check_tensor("scores", scores, torch.float32, (None, None), scores.device)
    check_tensor("positions", positions, torch.int64, tuple(scores.shape), scores.device)
    return torch.cat([bytes_as(scores[..., None], torch.uint8), bytes_as(positions[..., None], torch.uint8)], dim=2)


def unpack_candidates(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and positions of packed candidates; undoes pack_candidates."""
    check_tensor("packed", packed, torch.uint8, (None, None, CANDIDATE_BYTES), packed.device)
    score, position = packed[..., :SCORE_BYTES], packed[..., SCORE_BYTES:]
    return bytes_as(score, torch.float32).squeeze(2), bytes_as(position, torch.int64).squeeze(2)


def best_candidates_reference(
    scores: torch.Tensor, positions: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = (positions >= 0) & ~scores.isnan()
    positions = torch.where(chosen, positions, LAST_POSITION)
    positions, order = positions.sort(dim=1)
    # + 0.0 makes -0.0 0.0, which a sort by bits would part
    scores = torch.where(chosen, scores, float("-inf")).gather(1, order) + 0.0
    # stable: equal scores stay in the order of their positions, and padding behind every -inf
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    positions = positions.gather(1, order)
    return scores[:, :k], positions.masked_fill(positions == LAST_POSITION, PAD)[:, :k]


def best_candidates(
    scores: torch.Tensor, positions: torch.Tensor, k: int, *, backend: str = "torch"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best of each token's candidates, best first, then padding: fp32 and int64 [num_tokens, k].

    scores: [num_tokens, n] fp32; positions: [num_tokens, n] int64, distinct in a row or negative for none: those of
    several ranks or key spans side by side.
    """
    check_backend("best_candidates", backend)
    check_positive(k=k)
    check_tensor("scores", scores, torch.float32, (None, None), scores.device)
    check_tensor("positions", positions, torch.int64, tuple(scores.shape), scores.device)
    short = k - scores.shape[1]
    if short > 0:
        scores = torch.nn.functional.pad(scores, (0, short), value=float("-inf"))
        positions = torch.nn.functional.pad(positions, (0, short), value=PAD)
    elif short < 0:  # finding the k best is many times faster than sorting all
        column = _columns_of_best(scores, positions, k)
        scores, positions = scores.gather(1, column), positions.gather(1, column)
    return best_candidates_reference(scores, positions, k)


def _columns_of_best(scores: torch.Tensor, positions: torch.Tensor, k: int) -> torch.Tensor:
    """[num_tokens, k] int64, where the k best of each row stand, in no order; padding counts as the last positions."""
    num_tokens, n = scores.shape
    chosen = (positions >= 0) & ~scores.isnan()
    positions = torch.where(chosen, positions, LAST_POSITION - torch.arange(n, device=scores.device))
    scores = torch.where(chosen, scores, float("-inf"))
    kth = scores.topk(k, dim=1).values[:, -1:]
    above, tied = scores > kth, scores == kth
    # of the keys that score like the k-th, those at the lowest positions fill up the row
    room = k - above.sum(1, keepdim=True)
    in_order = torch.where(tied, positions, LAST_POSITION).topk(k, dim=1, largest=False, sorted=True).values
    kept = above | (tied & (positions <= in_order.gather(1, room - 1)))
    return kept.nonzero()[:, 1].view(num_tokens, k)


def global_topk(gathered: torch.Tensor, dcp_size: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and global positions [num_tokens, k] from every rank's packed candidates.

    gathered: [dcp_size * num_tokens, n, 12] uint8, rank after rank, as the all-gather lays them.
    """
    if gathered.shape[0] % dcp_size:
        raise PlanError(f"{gathered.shape[0]} rows of candidates from {dcp_size} ranks: each sends equally many")
    by_rank = (part.unflatten(0, (dcp_size, -1)) for part in unpack_candidates(gathered))
    scores, positions = (part.transpose(0, 1).flatten(1).contiguous() for part in by_rank)
    return best_candidates(scores, positions, k)
