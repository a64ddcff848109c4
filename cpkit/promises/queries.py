"""Cover: every query token is computed once, or by all PCP ranks with one KV writer, and can be put back."""

from collections.abc import Iterator

import numpy as np

from cpkit.arrays import IntArray
from cpkit.errors import PlanError
from cpkit.promises.compare import by_key, first
from cpkit.promises.held import Held, Replica
from cpkit.promises.violation import Violation
from cpkit.views.materialize import gather_layout


def cover_queries(replica: Replica, unsound: set[int]) -> Iterator[Violation]:
    """Mark off the tokens of each PCP group, and the places of the padded layout.

    unsound: ranks whose rows cannot be counted; their groups are left out.
    """
    tokens: dict[int, IntArray] = {}
    for held in replica.ranks:
        if held.number not in unsound and held.own not in tokens:
            tokens[held.own] = flat_tokens(held)
    counted: set[tuple[int, ...]] = set()
    for group in replica.pcp_groups:
        own = tuple(held.own for held in group)
        if own not in counted and all(number in tokens for number in own):
            counted.add(own)
            yield from _count_tokens(group, [tokens[number] for number in own])
    for alike in by_key(replica.ranks, lambda held: held.shared):
        yield from _layout(alike, tokens)


def flat_tokens(held: Held) -> IntArray:
    """[tokens of the rank] int64, place in the flat batch of each token of its rows, in their order."""
    rows, batch = held.rank.rows, held.plan.batch
    if not rows.num_tokens.any():
        return np.zeros(0, np.int64)
    start = batch.query_start_loc[rows.req] + rows.start_pos - batch.num_computed[rows.req]
    token = np.arange(int(rows.query_start_loc[-1]))
    if (rows.stride > 1).any():
        token *= np.repeat(rows.stride, rows.num_tokens)
    token += np.repeat(start - rows.stride * rows.query_start_loc[:-1], rows.num_tokens)
    return token


def _count_tokens(group: tuple[Held, ...], tokens: list[IntArray]) -> Iterator[Violation]:
    """Every token of the batch comes up once among the ranks of a PCP group, a replicated one once on each."""
    plan = group[0].plan
    computed = np.bincount(np.concatenate(tokens), minlength=plan.batch.num_tokens)
    replicated = plan.partition.replicated
    expected = np.repeat(np.where(replicated, len(group), 1), plan.batch.query_lens)
    if (token := first(computed != expected)) is not None:
        req, pos = place_of(plan.batch.query_start_loc, token)
        holders = [held.number for held, own in zip(group, tokens, strict=True) if token in own]
        detail = (
            f"query token {pos} of request {req} ({'replicated' if replicated[req] else 'not replicated'}) is computed "
            f"{computed[token]} times, by ranks {holders}; expected {expected[token]}"
        )
        yield Violation("cover", "query_tokens", tuple(held.number for held in group), detail)


def _layout(alike: list[Held], tokens: dict[int, IntArray]) -> Iterator[Violation]:
    """The padded layout that ranks with equal partitions gather into."""
    plan, numbers = alike[0].plan, tuple(held.number for held in alike)
    try:
        layout = gather_layout(plan)
    except (ValueError, IndexError, AssertionError) as error:  # a broken partition breaks in whatever it is used for
        yield Violation("cover", "layout", numbers, f"no layout can be made: {error}")
        return
    gathered, written = layout.gather_idx, layout.gather_idx[layout.writes_kv]
    token = np.arange(plan.batch.num_tokens)
    inside = (layout.restore_idx >= 0) & (layout.restore_idx < len(gathered))
    if len(layout.restore_idx) != len(token) or not inside.all():
        yield Violation("cover", "restore", numbers, "restore_idx does not name a gathered place for every query token")
    elif (lost := first(gathered[layout.restore_idx] != token)) is not None:
        place = layout.restore_idx[lost]
        detail = f"token {lost} would be restored from place {place}, which holds token {gathered[place]}"
        yield Violation("cover", "restore", numbers, detail)
    writers = np.bincount(written, minlength=len(token))
    if (lost := first(writers != 1)) is not None:
        req, pos = place_of(plan.batch.query_start_loc, lost)
        detail = f"the KV of query token {pos} of request {req} is written by {writers[lost]} ranks, expected 1"
        yield Violation("cover", "kv_writer", numbers, detail)
    for same_rows in by_key((held for held in alike if held.own in tokens), lambda held: held.own):
        yield from _segment(same_rows, tokens[same_rows[0].own], gathered)


def _segment(alike: list[Held], own: IntArray, gathered: IntArray) -> Iterator[Violation]:
    """A rank's segment of the layout holds the tokens of its rows, in their order."""
    start = alike[0].rank.pcp_rank * alike[0].plan.padded
    segment = gathered[start : start + alike[0].plan.padded]
    numbers = tuple(held.number for held in alike)
    if len(segment) < len(own):
        detail = f"{len(own)} query tokens, but every rank sends {len(segment)}"
        yield Violation("cover", "layout", numbers, detail)
    elif (place := first(segment[: len(own)] != own)) is not None:
        detail = f"local token {place} is flat token {own[place]} in its rows, {segment[place]} in the layout"
        yield Violation("cover", "layout", numbers, detail)


def place_of(starts: IntArray, at: int) -> tuple[int, int]:
    """Request and place in it of an entry of a flat list.  starts 0 2 2 5, at 3 -> request 2, place 1"""
    req = int(np.searchsorted(starts, at, side="right")) - 1
    if req >= len(starts) - 1:
        raise PlanError(f"entry {at} of a list that ends at {int(starts[-1])}")
    return req, at - int(starts[req])
