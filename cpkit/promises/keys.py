"""Cover: every new key is stored once in each DCP group, in a slot of its own in a block of its request.

Counted over what each rank stores. block_size=2, dcp_size=2, interleave=1, a request with 3 computed tokens, 4 new ones
and blocks 7 and 9; a block id spans 4 positions, and each rank fills its part of a block from the start:

    key       3   4   5   6        each once
    rank         0       0
    slot        18      19         block 9
    rank     1       1
    slot    15      18             blocks 7, 9
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cpkit.arrays import IntArray, prefix_sum
from cpkit.errors import PlanError
from cpkit.promises.compare import first
from cpkit.promises.held import Held, Replica
from cpkit.promises.queries import place_of
from cpkit.promises.violation import Violation
from cpkit.step import StepPlan
from cpkit.views.materialize import StoredKeys, stored_keys


def cover_keys(replica: Replica) -> Iterator[Violation]:
    """Mark off the new keys and slots of each DCP group, for every ratio of the model's caches."""
    for ratio in replica.lead.model.slot_ratios:
        counted: set[tuple[tuple[int, int], ...]] = set()
        for group in replica.dcp_groups:
            # what a rank stores follows from its shards, the batch and its place
            stores = tuple((held.shared, held.rank.dcp_rank) for held in group)
            if stores not in counted:
                counted.add(stores)
                yield from _count_group(group, ratio)


def _count_group(group: tuple[Held, ...], ratio: int) -> Iterator[Violation]:
    stored: list[StoredKeys] = []
    for held in group:
        try:
            stored.append(stored_keys(held.plan, held.rank, ratio))
        except PlanError as error:
            yield Violation("cover", "slots", (held.number,), f"ratio {ratio}: {error}")
            return
        except (LookupError, ValueError) as error:  # no shards of this ratio, or lengths that shrink
            yield Violation(
                "cover", "stored_keys", (held.number,), f"ratio {ratio}: stores nothing countable: {error!r}"
            )
            return
    numbers = np.array([held.number for held in group])
    holder = np.repeat(numbers, [len(part.key) for part in stored])
    req, key = (np.concatenate([getattr(part, name) for part in stored]) for name in ("req", "key"))
    yield from _count_keys(group, ratio, holder, req, key)
    if all(part.slot is not None for part in stored):
        slot = np.concatenate([part.slot for part in stored if part.slot is not None])
        yield from _check_slots(group[0].plan, ratio, _Slots(holder, req, key, slot))


def _count_keys(
    group: tuple[Held, ...], ratio: int, holder: IntArray, req: IntArray, key: IntArray
) -> Iterator[Violation]:
    """holder, req, key: [n] int64, the keys stored by all ranks of the group."""
    batch = group[0].plan.batch
    before = batch.num_computed // ratio
    starts = prefix_sum(batch.seq_lens // ratio - before)
    place = key + (starts[:-1] - before)[req]
    if (at := first((place < starts[req]) | (place >= starts[1:][req]))) is not None:
        detail = f"ratio {ratio}: key {key[at]} of request {req[at]} is not new in this step"
        yield Violation("cover", "stored_keys", (int(holder[at]),), detail)
        return
    copies = np.bincount(place, minlength=int(starts[-1]))
    if (at := first(copies != 1)) is not None:
        lost, new = place_of(starts, at)
        holders = holder[place == at].tolist()
        detail = f"ratio {ratio}: key {new + before[lost]} of request {lost} is stored by ranks {holders}, expected one"
        yield Violation("cover", "stored_keys", tuple(holders) or tuple(held.number for held in group), detail)


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Slots of all ranks of a group, [n] int64 each, by rank, request and key."""

    holder: IntArray
    req: IntArray
    key: IntArray
    slot: IntArray

    def violation(self, at: int, ratio: int, words: str) -> Violation:
        where = f"ratio {ratio}: key {self.key[at]} of request {self.req[at]} goes to slot {self.slot[at]}, {words}"
        return Violation("cover", "slots", (int(self.holder[at]),), where)


def _check_slots(plan: StepPlan, ratio: int, slots: _Slots) -> Iterator[Violation]:
    """The first slot outside its block, then the first that another key has, then the first out of turn."""
    tables, topology = plan.batch.block_tables, plan.topology
    assert tables is not None
    states_per_block = topology.block_size // ratio
    block = slots.slot // states_per_block
    offset = slots.slot - block * states_per_block
    column = slots.key // (topology.virtual_block // ratio)
    inside = column < tables.shape[1]
    named = tables[slots.req, np.where(inside, column, 0)]
    if (at := first((block == 0) | ~inside | (block != named))) is not None:
        due = f"whose block for it, number {column[at]}, is {named[at] if inside[at] else 'not in the table'}"
        yield slots.violation(
            at, ratio, f"in block {block[at]}; the request's block table has {tables.shape[1]} columns, {due}"
        )
        return
    every = slots.slot * plan.topology.world_size + slots.holder
    in_order = np.sort(every)
    if (twice := first(in_order[1:] == in_order[:-1])) is not None:
        at = int(np.flatnonzero(every == in_order[twice])[1])
        yield slots.violation(at, ratio, "which holds another key of this step")
        return
    # a rank's next key of a request takes the next row of the block, and the first row of a further block
    along = (slots.req[1:] == slots.req[:-1]) & (slots.holder[1:] == slots.holder[:-1])
    due_offset = np.where(block[1:] == block[:-1], offset[:-1] + 1, 0)
    if (at := first(along & (offset[1:] != due_offset))) is not None:
        yield slots.violation(at + 1, ratio, f"row {offset[at + 1]} of its block, where row {due_offset[at]} is next")
