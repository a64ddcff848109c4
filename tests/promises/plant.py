"""Ways to plant a fault: change one value of right plans, in every rank's or in one's, and leave the rest as it is."""

from dataclasses import replace

import numpy as np


def everywhere(change):
    """Every rank's plan with a fault, so that all of them agree on it."""
    return lambda plans: [change(plan) for plan in plans]


def on(rank, change):
    """The fault in the plan of one rank."""
    return lambda plans: [change(plan) if plan.ranks[0].rank == rank else plan for plan in plans]


def put(values, at, value):
    """The array with one entry replaced, still read-only."""
    out = np.array(values)
    out[at] = value
    out.flags.writeable = False
    return out


def in_rank(**changes):
    return lambda plan: replace(plan, ranks=(replace(plan.ranks[0], **changes),))


def in_rows(change):
    """change: rows -> fields to replace."""
    return lambda plan: in_rank(rows=replace(plan.ranks[0].rows, **change(plan.ranks[0].rows)))(plan)


def in_batch(change):
    return lambda plan: replace(plan, batch=replace(plan.batch, **change(plan.batch)))


def in_shards(change):
    return lambda plan: replace(plan, shards={1: replace(plan.shards[1], **change(plan.shards[1]))})


def in_chunk(at, change):
    """change: chunk -> fields to replace, in one chunk of ratio 1."""

    def plant(plan):
        chunks = list(plan.ranks[0].chunks[1])
        chunks[at] = replace(chunks[at], **change(chunks[at]))
        return in_rank(chunks={1: tuple(chunks)})(plan)

    return plant


def cut_inside_a_round(plan):
    """The first two spans of a row meet one key early; all else follows from it."""
    plan = in_chunk(0, lambda c: {"key_stop": c.key_stop - 1, "num_keys": c.num_keys - 1})(plan)
    return in_chunk(1, lambda c: {"key_start": c.key_start - 1, "num_keys": c.num_keys + 1})(plan)


def in_gather(at, change):
    def plant(plan):
        gathers = list(plan.ranks[0].gathers[1])
        gathers[at] = replace(gathers[at], **change(gathers[at]))
        return in_rank(gathers={1: tuple(gathers)})(plan)

    return plant


def in_first_layer(change):
    """change: the collectives of the first kind of layer -> others."""

    def plant(plan):
        first, *others = plan.collectives.layers
        return replace(plan, collectives=replace(plan.collectives, layers=(tuple(change(first)), *others)))

    return plant


def one_collective(**changes):
    return in_first_layer(lambda listed: [listed[0], replace(listed[1], **changes), *listed[2:]])


def limits(**changes):
    return everywhere(lambda plan: replace(plan, budget=replace(plan.budget, **changes)))


def shift(rows, row, by=1):
    """A row moved along its request, without contradicting itself."""
    return {
        "start_pos": rows.start_pos + by * (np.arange(len(rows.req)) == row),
        "seq_lens": rows.seq_lens + by * (np.arange(len(rows.req)) == row),
    }


def shorten(rows, row):
    fewer = np.arange(len(rows.req)) == row
    num_tokens = rows.num_tokens - fewer
    return {"num_tokens": num_tokens, "seq_lens": rows.seq_lens - fewer, "query_start_loc": np.cumsum([0, *num_tokens])}


def swap_rows(rows, first):
    order = np.arange(len(rows.req))
    order[[first, first + 1]] = order[[first + 1, first]]
    names = ("req", "start_pos", "stride", "num_tokens", "seq_lens", "is_prefilling")
    moved = {name: getattr(rows, name)[order] for name in names}
    return moved | {"query_start_loc": np.cumsum([0, *moved["num_tokens"]])}


def share_block(batch):
    """Requests 2 and 3 write into one block."""
    return {"block_tables": put(batch.block_tables, (3, 4), int(batch.block_tables[2, 0]))}


def two_empty_rows(rows):
    twice = {
        name: np.repeat(getattr(rows, name), 2)
        for name in ("req", "start_pos", "stride", "num_tokens", "seq_lens", "is_prefilling")
    }
    return twice | {"query_start_loc": np.zeros(3, np.int64)}


def same_number_twice(gather):
    return {"row_region": put(gather.row_region, -1, 0)}
