"""Attention of query tokens over the keys each may see, chosen or in a range, with the LSE that merging needs.

    score = softmax_scale * q[h]·key         over all keys of the token, of every group of keys together
    lse   = log(sum(exp(score)))             natural, fp32
    out   = sum(exp(score - lse) * key[:value_dim])

A key's values are the front of the key itself: V3.2 scores 576 numbers and sums 512, V4 uses all 512 for both. Keys
come in groups, and one softmax spans the groups: a V4 token attends its chosen states and its sliding window.

    SelectedKeys(rows, indices)       indices   4 0 -1 | 2 -1 -1      token 0 sees rows 4 and 0, token 1 row 2
    KeyRange(rows, start, end)        start, end   0 3 | 1 1          token 0 sees rows 0 1 2, token 1 none

A token without keys has out 0 and lse -inf. An index outside the rows, -1 among them, is no key; one named twice counts
twice. A row that a token does not see has no influence on it, NaN included.

query: [num_tokens, H, D] fp32, bf16 or fp16. rows: [num_rows, D] of these dtypes, dequantized. indices: [num_tokens,
k], start, end: [num_tokens], int32 or int64. Result: out [num_tokens, H, value_dim] and lse [num_tokens, H], fp32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpkit.errors import PlanError
from cpkit.kernels.backends import check_backend
from cpkit.kernels.checks import INTS, check_positive, check_tensor
from cpkit.kernels.fp8 import FLOATS
from cpkit.planner.slots import PAD

TILE_ROWS = 1024
"""Queries (tokens times heads) that share one matrix product: enough to keep it busy, few enough to stay in cache."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectedKeys:
    """Keys by index: the top-k of an indexer, or the slots of a sliding window."""

    rows: torch.Tensor
    indices: torch.Tensor

    def check(self, num_tokens: int) -> None:
        """Raise PlanError unless the group is of this many tokens."""
        check_tensor("indices", self.indices, INTS, (num_tokens, None), self.rows.device)

    def of_token(self, token: int) -> torch.Tensor:
        """[n] int64, the rows that one token sees."""
        index = self.indices[token].long()
        return index[(index >= 0) & (index < len(self.rows))]

    def of_tile(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that any of some tokens see, and [tokens, rows] fp32, how often each token sees each of them."""
        used, place = used_slots(self.indices[tokens], len(self.rows))
        counts = torch.zeros(len(place), len(used) + 1, device=place.device)  # the last column: of no row
        column = place.masked_fill(place == PAD, len(used))
        counts.scatter_add_(1, column, counts.new_ones(()).expand(column.shape))
        return self.rows[used], counts[:, :-1]


@dataclass(frozen=True, slots=True, eq=False)
class KeyRange:
    """Keys start .. end - 1 of the rows: all complete states, where a layer has no indexer."""

    rows: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor

    def check(self, num_tokens: int) -> None:
        """Raise PlanError unless the group is of this many tokens."""
        check_tensor("start", self.start, INTS, (num_tokens,), self.rows.device)
        check_tensor("end", self.end, INTS, (num_tokens,), self.rows.device)

    def of_token(self, token: int) -> torch.Tensor:
        """[n] int64, the rows that one token sees."""
        end = min(int(self.end[token]), len(self.rows))
        start = min(max(int(self.start[token]), 0), max(end, 0))
        return torch.arange(start, max(end, 0), device=self.rows.device)

    def of_tile(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that any of some tokens see, and [tokens, rows] fp32, 1 where a token sees one of them."""
        start, end = self.start[tokens].clamp(min=0), self.end[tokens].clamp(max=len(self.rows))
        filled = start < end
        if not filled.any():
            return self.rows[:0], torch.zeros(len(start), 0, device=start.device)
        first, last = int(start[filled].min()), int(end[filled].max())
        row = torch.arange(first, last, device=start.device)
        return self.rows[first:last], ((row >= start[:, None]) & (row < end[:, None])).float()


Keys = SelectedKeys | KeyRange


def sparse_attention_reference(
    query: torch.Tensor, keys: Sequence[Keys], *, value_dim: int, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_zeros(*query.shape[:2], value_dim, dtype=torch.float32)
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    for token in range(len(query)):
        rows = torch.cat([group.rows[group.of_token(token)].float() for group in keys])
        if len(rows):
            scores = softmax_scale * (query[token].float() @ rows.T)
            lse[token] = scores.logsumexp(1)
            out[token] = torch.exp(scores - lse[token][:, None]) @ rows[:, :value_dim]
    return out, lse


def sparse_attention(
    query: torch.Tensor,
    keys: Sequence[Keys],
    *,
    value_dim: int,
    softmax_scale: float,
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial output and LSE of every query token and head over the groups of keys."""
    check_backend("sparse_attention", backend)
    check_tensor("query", query, FLOATS, (None, None, None), query.device)
    num_tokens, num_heads, dim = query.shape
    check_positive(num_heads=num_heads, value_dim=value_dim)
    if value_dim > dim:
        raise PlanError(f"value_dim={value_dim} of keys of {dim} values: the values are the front of the key")
    for group in keys:
        check_tensor("rows", group.rows, FLOATS, (None, dim), query.device)
        group.check(num_tokens)
    out = query.new_zeros(num_tokens, num_heads, value_dim, dtype=torch.float32)
    lse = query.new_full((num_tokens, num_heads), float("-inf"), dtype=torch.float32)
    tile = max(1, TILE_ROWS // num_heads)
    if keys:
        for start in range(0, num_tokens, tile):
            _attend(query, keys, slice(start, min(start + tile, num_tokens)), softmax_scale, out, lse)
    return out, lse


def used_slots(indices: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of a cache that indices name, once each, and the indices as places in that list.  9 4 -1 | 4 7 -1:

        slots    4 7 9              what to gather and dequantize
        indices  2 0 -1 | 0 1 -1    what SelectedKeys takes with it

    indices: [num_tokens, k] int32 or int64, -1 or outside 0 .. num_slots - 1 for none. Both results int64.
    """
    check_tensor("indices", indices, INTS, (None, None), indices.device)
    inside = (indices >= 0) & (indices < num_slots)
    named = torch.zeros(num_slots, dtype=torch.bool, device=indices.device)
    named[indices[inside].long()] = True
    place = named.long().cumsum(0) - 1
    if not num_slots:
        return place, torch.full_like(indices, PAD, dtype=torch.int64)
    return named.nonzero()[:, 0], torch.where(inside, place[torch.where(inside, indices, 0).long()], PAD)


def _attend(
    query: torch.Tensor, keys: Sequence[Keys], tokens: slice, softmax_scale: float, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Tokens that see mostly the same keys share a matrix product over the union of these; others are parted.

    So are tokens among whose keys is a NaN or infinity: a product with weight 0 would carry it to a token that does not
    see it. Alone, a token meets only its own keys.
    """
    tiles = [group.of_tile(tokens) for group in keys]
    rows = torch.cat([rows for rows, _ in tiles]).float()
    counts = torch.cat([counts for _, counts in tiles], dim=1)
    num_tokens, num_keys = counts.shape
    if not num_keys:
        return
    if num_tokens > 1 and (num_keys > 2 * int(counts.sum(1).max()) or not _all_finite(rows)):
        middle = tokens.start + num_tokens // 2
        _attend(query, keys, slice(tokens.start, middle), softmax_scale, out, lse)
        _attend(query, keys, slice(middle, tokens.stop), softmax_scale, out, lse)
        return
    num_heads, value_dim = out.shape[1:]
    scaled = query[tokens].float().flatten(0, 1) * softmax_scale
    # a key seen n times weighs n * exp(score) = exp(score + log n); log 0 is -inf
    scores = (scaled @ rows.T).view(num_tokens, num_heads, num_keys).add_(counts.log()[:, None])
    top = scores.amax(2, keepdim=True)
    weights = scores.sub_(top.masked_fill(top == float("-inf"), 0.0)).exp_()
    total = weights.sum(2)
    values = (weights.flatten(0, 1) @ rows[:, :value_dim]).view(num_tokens, num_heads, value_dim)
    out[tokens] = values / total.masked_fill(total == 0, 1.0)[..., None]
    lse[tokens] = top[..., 0] + total.log()


def _all_finite(rows: torch.Tensor) -> bool:
    """Both ends of the values' range are finite; a NaN makes both NaN. One pass, without an array of flags."""
    low, high = rows.aminmax()
    return math.isfinite(low) and math.isfinite(high)
