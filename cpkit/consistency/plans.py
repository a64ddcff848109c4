"""Agree: the fields of a step's plan that ranks must have in common, and the first place where they do not.

scope       ranks                         fields
world       all of the job                topology, model, budget, merge
replica     one dp place: the PCP groups  the batch, partition, padded, shard_keys, collectives
dcp         one DCP group                 chunks, gathers

Equal digests decide. Where they differ the values say where, as far as the plan holds them: a saved plan knows a model
by its name alone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cpkit.digest import digest
from cpkit.errors import PlanError
from cpkit.promises.compare import by_key, difference, other_ranks, same
from cpkit.promises.violation import show_ranks
from cpkit.step import StepPlan
from cpkit.topology import Topology
from cpkit.views.plan_data import chunk_data
from cpkit.views.saved_plan import BATCH_FIELDS, SavedPlan

WORLD = ("topology", "model", "budget", "merge")
REPLICA = (*BATCH_FIELDS, "block_tables", "partition", "padded", "shard_keys", "collectives")
DCP = ("chunks", "gathers")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A field that some ranks planned differently from most.

    scope: world, replica or dcp; group: the ranks that must agree; ranks: those in the minority, and the plans that
    they come from. digests: theirs, and that of most. detail: the first place that differs, with both values.
    """

    field: str
    scope: str
    group: tuple[int, ...]
    ranks: tuple[int, ...]
    sources: tuple[str, ...]
    digests: tuple[str, str]
    detail: str

    def __str__(self) -> str:
        return f"{self.field} ({self.scope}): {show_ranks(self.ranks)} of {', '.join(self.sources)}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Planned:
    """What one rank planned: a digest for each field, and values that show where it differs."""

    source: str
    rank: int
    topology: Topology
    digests: dict[str, str]
    values: dict[str, Any]


def agree(plans: Sequence[StepPlan | SavedPlan], sources: Sequence[str] | None = None) -> tuple[Disagreement, ...]:
    """Every field that ranks of a group planned differently; empty when all agree.

    plans: of one step, each made wherever, also from different batches or settings; ranks that are not there are not
    missed, and a rank may be there more than once. sources: names of the plans (plan 0, plan 1, ...).
    Raises PlanError without a plan.
    """
    names = [f"plan {i}" for i in range(len(plans))] if sources is None else sources
    planned = [one for name, plan in zip(names, plans, strict=True) for one in planned_ranks(name, plan)]
    if not planned:
        raise PlanError("no plans to compare: give those of every rank")
    [(topology, _)] = Counter(one.topology for one in planned).most_common(1)
    return disagreements(planned, topology)


def disagreements(ranks: Iterable[Planned], topology: Topology) -> tuple[Disagreement, ...]:
    """Every field that ranks of a group of this topology planned differently; empty when all agree."""
    planned = sorted(ranks, key=lambda one: one.rank)
    at_home = [one for one in planned if one.rank < topology.world_size]
    replicas = by_key(at_home, lambda one: topology.coords(one.rank).dp)
    groups = by_key(at_home, lambda one: topology.group_of("dcp", one.rank))
    return (
        *_compare("world", WORLD, planned),
        *[apart for ranks in replicas for apart in _compare("replica", REPLICA, ranks)],
        *[apart for ranks in groups for apart in _compare("dcp", DCP, ranks)],
    )


def _compare(scope: str, names: Sequence[str], planned: Sequence[Planned]) -> Iterator[Disagreement]:
    """One for each digest of a field that is not the most common."""
    for name in names:
        camps = by_key(planned, lambda one: one.digests[name])  # noqa: B023  # used before the loop goes on
        most = max(camps, key=len)
        for camp in camps:
            if camp is not most:
                yield Disagreement(
                    field=name,
                    scope=scope,
                    group=tuple(dict.fromkeys(one.rank for one in planned)),
                    ranks=tuple(dict.fromkeys(one.rank for one in camp)),
                    sources=tuple(dict.fromkeys(one.source for one in camp)),
                    digests=(camp[0].digests[name], most[0].digests[name]),
                    detail=_detail(name, camp[0], most[0], other_ranks(len(camp), len(most))),
                )


def _detail(name: str, odd: Planned, most: Planned, others: str) -> str:
    a, b = odd.values[name], most.values[name]
    if type(a) is not type(b) or same(a, b):
        return f"{name} has digest {odd.digests[name]}, on {others} {most.digests[name]}"
    return difference(name, a, b, others)


def planned_ranks(source: str, plan: StepPlan | SavedPlan) -> list[Planned]:
    """Each rank of a plan, ready to be compared; source: names the plan in messages."""
    if isinstance(plan, StepPlan):
        digests, values, topology = plan.digests(), _step_values(plan), plan.topology
        own = {rank.rank: chunk_data(rank) for rank in plan.ranks}
    else:
        digests, values = plan.header["digests"], _saved_values(plan)
        topology = Topology(**plan.header["topology"])
        own = {place["rank"]: {name: place[name] for name in DCP} for place in plan.header["ranks"]}
    return [
        Planned(source, rank, topology, digests | {name: digest(data[name]) for name in DCP}, values | data)
        for rank, data in own.items()
    ]


def _step_values(plan: StepPlan) -> dict[str, Any]:
    return {
        **{name: getattr(plan.batch, name) for name in (*BATCH_FIELDS, "block_tables")},
        **{name: getattr(plan, name) for name in (*WORLD, "partition", "padded", "collectives")},
        "shard_keys": {ratio: shards.shard_keys for ratio, shards in plan.shards.items()},
    }


def _saved_values(saved: SavedPlan) -> dict[str, Any]:
    header = saved.header
    return {
        **{name: getattr(saved.batch, name) for name in (*BATCH_FIELDS, "block_tables")},
        **{name: header[name] for name in (*WORLD, "padded", "shard_keys", "collectives")},
        "partition": {"strategy": header["partition"], "num_tokens": header["pcp_tokens"]},
    }
