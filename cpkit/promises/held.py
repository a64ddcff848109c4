"""The ranks of one replica, each with the plan it came from, and what some of them share.

Plans are made independently, so equal values are different objects. What a check counts from equal values is counted
once: values are compared first, and a rank is known by the first rank that holds the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cpkit.errors import PlanError
from cpkit.promises.compare import by_key, distinct
from cpkit.promises.violation import show_ranks
from cpkit.step import RankPlan, StepPlan
from cpkit.topology import Topology

DERIVED = ("merge", "partition", "padded", "shards", "collectives")
"""What every rank derives, or is told, alike."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One rank's plan.

    Ranks with the same number `shared` have equal partitions, padded sizes and shards; ranks with the same number `own`
    moreover have equal rows, chunks and gathers.
    """

    plan: StepPlan
    rank: RankPlan
    shared: int
    own: int

    @property
    def number(self) -> int:
        """The rank in the world."""
        return self.rank.rank


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """All ranks that work on one batch, and the groups they form, each in group order.

    plans: as they were given. leads: for each name of DERIVED and each plan, the index of the first plan with the same.
    """

    plans: tuple[StepPlan, ...]
    leads: dict[str, list[int]]
    ranks: tuple[Held, ...]
    pcp_groups: tuple[tuple[Held, ...], ...]
    dcp_groups: tuple[tuple[Held, ...], ...]

    @property
    def lead(self) -> StepPlan:
        """A plan to read what all ranks agree on from: batch, topology, model."""
        return self.ranks[0].plan


def hold(plans: Sequence[StepPlan]) -> Replica:
    """The replica that plans with equal batch, topology, model and budget describe.

    Raises PlanError unless they hold each rank of one replica exactly once.
    """
    topology = plans[0].topology
    pairs = sorted(((plan, rank) for plan in plans for rank in plan.ranks), key=lambda pair: pair[1].rank)
    check_ranks([rank.rank for _, rank in pairs], topology)
    leads = {name: distinct([getattr(plan, name) for plan in plans]) for name in DERIVED}
    alike = distinct(list(zip(*(leads[name] for name in ("partition", "padded", "shards")), strict=True)))
    shared_of = {id(plan): number for plan, number in zip(plans, alike, strict=True)}
    own = _own_numbers([rank for _, rank in pairs])
    held = {
        rank.rank: Held(plan, rank, shared_of[id(plan)], number)
        for (plan, rank), number in zip(pairs, own, strict=True)
    }

    def groups(name: str) -> tuple[tuple[Held, ...], ...]:
        return tuple(tuple(held[rank] for rank in group) for group in topology.groups(name) if group[0] in held)

    return Replica(tuple(plans), leads, tuple(held.values()), groups("pcp"), groups("dcp"))


def check_ranks(ranks: Sequence[int], topology: Topology) -> None:
    """Refuse a set of plans from which something would be missing or counted twice."""
    size = topology.replica_size
    start = min(ranks, default=0) // size * size
    expected = range(start, start + size)
    if list(ranks) == list(expected):
        return
    missing = sorted(set(expected) - set(ranks))
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    beyond = sorted(set(ranks) - set(expected))
    faults = [
        f"{word} {show_ranks(some)}" for word, some in (("no", missing), ("twice", twice), ("beyond", beyond)) if some
    ]
    raise PlanError(
        f"plans of {len(ranks)} ranks: {'; '.join(faults)}: a step is checked with each rank of a replica once, here "
        f"{expected.start}..{expected.stop - 1} (pcp={topology.pcp} * tp={topology.tp})"
    )


def _own_numbers(ranks: list[RankPlan]) -> list[int]:
    """For each rank the number of the first with equal rows, chunks and gathers; only equal pcp_ranks are compared."""
    numbers: dict[int, int] = {}
    for group in by_key(ranks, lambda rank: rank.pcp_rank):
        leads = distinct([(rank.rows, rank.chunks, rank.gathers) for rank in group])
        numbers |= {rank.rank: group[lead].rank for rank, lead in zip(group, leads, strict=True)}
    return [numbers[rank.rank] for rank in ranks]
