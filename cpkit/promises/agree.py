"""Agree: all ranks derive the same step from the same batch, so none waits for a collective that another never enters.

Values are compared rather than their digests: that is as strict, says where they differ, and costs less.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from cpkit.promises.compare import difference, distinct, other_ranks
from cpkit.promises.held import DERIVED, Replica
from cpkit.promises.violation import Violation
from cpkit.step import StepPlan

BATCH = ("seq_lens", "query_lens", "prompt_lens", "req_ids", "block_tables")
SETTINGS = ("topology", "model", "budget")
"""What a step is planned from, beside the batch. Ranks that differ here plan different steps."""


def agree_inputs(plans: Sequence[StepPlan]) -> Iterator[Violation]:
    """Ranks that were given something else than most."""
    ranks = [tuple(rank.rank for rank in plan.ranks) for plan in plans]
    for name in BATCH:
        yield from _compare(name, [getattr(plan.batch, name) for plan in plans], ranks)
    for name in SETTINGS:
        yield from _compare(name, [getattr(plan, name) for plan in plans], ranks)


def agree_plans(replica: Replica) -> Iterator[Violation]:
    """Ranks that derived something else than most; collectives by operation, group, dtype, size and order."""
    ranks = [tuple(rank.rank for rank in plan.ranks) for plan in replica.plans]
    for name in DERIVED:
        yield from _outvoted(name, [getattr(plan, name) for plan in replica.plans], replica.leads[name], ranks)


def agree_chunks(replica: Replica) -> Iterator[Violation]:
    """Ranks of a DCP group with chunk bounds or padded extents of their own: the group works chunk by chunk."""
    if replica.lead.topology.dcp == 1:
        return
    compared: set[frozenset[int]] = set()
    for group in replica.dcp_groups:
        ranks_of: dict[int, list[int]] = {}
        for held in group:
            ranks_of.setdefault(held.own, []).append(held.number)
        if compared.isdisjoint({own := frozenset(ranks_of)}):
            compared.add(own)
            planned = {held.own: held.rank for held in group}
            ranks = [tuple(ranks_of[number]) for number in planned]
            yield from _compare("chunks", [rank.chunks for rank in planned.values()], ranks)
            yield from _compare("gathers", [rank.gathers for rank in planned.values()], ranks)


def _compare(name: str, values: Sequence[Any], ranks: Sequence[tuple[int, ...]]) -> Iterator[Violation]:
    """ranks: those that hold each of the values."""
    yield from _outvoted(name, values, distinct(values), ranks)


def _outvoted(
    name: str, values: Sequence[Any], leads: Sequence[int], ranks: Sequence[tuple[int, ...]]
) -> Iterator[Violation]:
    """One violation for each value that is not the most common; leads: index of the first equal value, of each."""
    if len(set(leads)) == 1:
        return
    votes: Counter[int] = Counter()
    for lead, holders in zip(leads, ranks, strict=True):
        votes[lead] += len(holders)
    most = max(votes, key=lambda lead: votes[lead])
    for lead in votes:
        if lead != most:
            minority = sorted(rank for at, holders in zip(leads, ranks, strict=True) if at == lead for rank in holders)
            others = other_ranks(votes[lead], votes[most])
            yield Violation("agree", name, tuple(minority), difference(name, values[lead], values[most], others))
