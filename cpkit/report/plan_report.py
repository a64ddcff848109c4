"""A planned step as text: who computes and stores which tokens, in which chunks, with which collectives."""

from collections.abc import Iterator

import numpy as np

from cpkit.arrays import IntArray
from cpkit.digest import digest
from cpkit.errors import PlanError
from cpkit.planner.chunks import Chunk
from cpkit.planner.partition import REPLICATED, WHOLE, Segments
from cpkit.planner.rows import Rows
from cpkit.report.strip import fits_strip, strips
from cpkit.report.table import count, indent, plural, share, shorten, size, table
from cpkit.report.words import merge_text, partition_text, sizes_text, stages_text
from cpkit.step import RankPlan, StepPlan
from cpkit.views.balance import imbalance, plan_balance
from cpkit.views.materialize import shard_lens, stored_keys
from cpkit.views.traffic import step_traffic

MAX_ROWS = 14
SEGMENTS_WIDTH = 60
MAX_RUNS = 4


def plan_report(plan: StepPlan, rank: int | None = None) -> str:
    """The whole report; with a rank, its rows, keys and chunks in place of the overview of all ranks."""
    lines = _title(plan)
    if rank is None:
        lead = plan.ranks[0]
        if fits_strip(plan):
            lines += ["", *_strip_section(plan)]
        lines += ["", *_computed_table(plan), "", *_stored_table(plan)]
    else:
        lead = plan.rank(rank)
        lines += ["", *_rank_place(plan, lead), "", *_rows_table(plan, lead.rows), "", *_keys_table(plan, lead)]
    lines += [*_chunk_tables(plan, lead), "", *_collective_table(plan), "", *_traffic_table(plan)]
    return "\n".join(lines)


def _title(plan: StepPlan) -> list[str]:
    batch, topology = plan.batch, plan.topology
    num_decodes = batch.num_decodes
    one_of = topology.world_size // topology.replica_size
    replica = f", shown for the first of {one_of}" if one_of > 1 else ""
    dealt = "dealt out" if (plan.partition.mode == WHOLE).any() else "replicated" if topology.pcp > 1 else "whole"
    strategy, merge = partition_text(plan.partition.strategy, topology), merge_text(plan.merge, topology)
    return [
        f"Step      {plural(batch.num_reqs, 'request')}: {plural(num_decodes, 'decode')}, "
        f"{plural(batch.num_reqs - num_decodes, 'prefill')}; {plural(batch.num_tokens, 'query token')}, "
        f"{plural(int(batch.seq_lens.sum()), 'token')} of context",
        f"World     {plan.model.name}, {sizes_text(topology)}: {plural(topology.replica_size, 'rank')} a replica"
        f"{replica}; interleave {topology.interleave}, block {topology.block_size}",
        f"Choices   partition {strategy}, decodes {dealt}, merge {merge}",
        f"Digest    {digest(list(plan.digests().items()))}, of all that the ranks must agree on",
    ]


def _strip_section(plan: StepPlan) -> list[str]:
    return [
        "Tokens by position. Computed by: PCP rank (* every rank, . before this step). "
        "Stored by: DCP rank (* every rank)",
        *strips(plan),
    ]


# ---- all ranks -------------------------------------------------------------------------------------------------------


def _computed_table(plan: StepPlan) -> list[str]:
    """One line a PCP rank: the TP ranks of each compute the same tokens for other heads."""
    balance, topology = plan_balance([plan]), plan.topology
    rows = []
    for pcp_rank in range(topology.pcp):
        members = [r for r in range(topology.replica_size) if topology.coords(r).pcp == pcp_rank]
        tokens = int(plan.partition.num_tokens[pcp_rank])
        work = count(int(balance.causal_work[members[0]]))
        held = segments_text(plan, plan.partition.segments(pcp_rank))
        rows.append([str(pcp_rank), numbers(members), count(tokens), count(plan.padded - tokens), work, held])
    header = ["pcp rank", "world ranks", "tokens", "padding", "causal work", "request[positions)"]
    every = ", * on every rank" if plan.partition.replicated.any() and topology.pcp > 1 else ""
    return [
        f"Who computes the query tokens{every}. Causal work: query-key pairs of all layers, largest/mean "
        f"{imbalance(balance.causal_work):.3f}",
        *indent(table(header, shorten(rows, MAX_ROWS), "rlrrrl")),
    ]


def _stored_table(plan: StepPlan) -> list[str]:
    """One line a DCP rank: all groups of a replica hold the same keys."""
    topology = plan.topology
    members: dict[int, list[int]] = {}
    for world_rank in range(topology.replica_size):
        members.setdefault(topology.dcp_rank(world_rank), []).append(world_rank)
    rows = []
    for dcp_rank in range(topology.dcp):
        lens = {ratio: shard_lens(plan, dcp_rank, ratio) for ratio in plan.shards}
        held = {ratio: int(after.sum()) for ratio, (_, after) in lens.items()}
        written = [count(int((after - before).sum())) for before, after in lens.values()]
        keys = [count(number) for number in held.values()]
        rows.append([str(dcp_rank), numbers(members[dcp_rank]), *keys, size(cache_bytes(plan, held)), *written])
    names = ["keys" if ratio == 1 else f"keys/{ratio}" for ratio in plan.shards]
    header = ["dcp rank", "world ranks", *names, "all layers", *(f"new {name}" for name in names)]
    title = f"Who stores the keys, this step's included: largest/mean {imbalance(plan_balance([plan]).stored_keys):.3f}"
    if any(ratio > 1 for ratio in plan.shards):
        title += " (keys/4: one key stands for 4 tokens)"
    return [title, *indent(table(header, shorten(rows, MAX_ROWS), "rl" + "r" * (len(header) - 2)))]


def cache_bytes(plan: StepPlan, keys: dict[int, int]) -> int:
    """Bytes of so many keys of each compress ratio in the sharded caches of all layers (no windows, no tails)."""
    total = 0
    for layer in plan.model.layers:
        if layer.compress_ratio and layer.owns_keys:
            total += layer.num_layers * layer.key_bytes * keys[layer.compress_ratio]
        if layer.index and layer.owns_index_keys:
            total += layer.num_layers * layer.index.key_bytes * keys[layer.index.ratio]
    return total


def segments_text(plan: StepPlan, segments: Segments) -> str:
    """What a rank computes, cut to a readable width.  0[9:10) 1[2:4) 1[8:9), and 1[2:9:2) for every second position"""
    batch = plan.batch
    parts: list[str] = []
    width = 0
    columns = (segments.req, segments.start, segments.stride, segments.count)
    for i, (req, start, stride, tokens) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        first = int(batch.num_computed[req]) + start
        stop = first + (tokens - 1) * stride + 1
        step = f":{stride}" if stride > 1 and tokens > 1 else ""
        shared = "*" if plan.partition.mode[req] == REPLICATED and plan.partition.pcp_size > 1 else ""
        part = f"{int(batch.req_ids[req])}[{first}:{stop}{step}){shared}"
        if parts and width + len(part) > SEGMENTS_WIDTH:
            return " ".join([*parts, f"... {len(segments.req) - i} more"])
        parts.append(part)
        width += len(part) + 1
    return " ".join(parts) or "nothing"


# ---- one rank --------------------------------------------------------------------------------------------------------


def _rank_place(plan: StepPlan, rank: RankPlan) -> list[str]:
    topology = plan.topology
    coords = topology.coords(rank.rank)
    lines = [f"Rank {rank.rank}: tp rank {coords.tp}, pcp rank {coords.pcp}, dcp rank {rank.dcp_rank}"]
    groups = [
        (name, topology.group_of(name, rank.rank)) for name in ("pcp", "dcp", "tp") if getattr(topology, name) > 1
    ]
    return lines + [f"  {name} group  {numbers(list(group))}" for name, group in groups]


def _rows_table(plan: StepPlan, rows: Rows) -> list[str]:
    header = ["row", "request", "planned as", "positions", "tokens", "sees keys", "samples at"]
    cells = []
    for i in range(len(rows.req)):
        tokens, start, stride = int(rows.num_tokens[i]), int(rows.start_pos[i]), int(rows.stride[i])
        step = f":{stride}" if stride > 1 and tokens > 1 else ""
        stop = start + (tokens - 1) * stride + 1 if tokens else start
        cells.append(
            [
                str(i),
                str(int(plan.batch.req_ids[rows.req[i]])) if plan.batch.num_reqs else "-",
                "decode" if i < rows.num_decodes else "prefill",
                f"[{start}:{stop}{step})",
                count(tokens),
                count(int(rows.seq_lens[i])),
                str(int(rows.logits_idx[i])),
            ]
        )
    title = f"Its rows: {plural(rows.total_tokens, 'query token')}, padded to {plan.padded:,}"
    return [title, *indent(table(header, shorten(cells, MAX_ROWS), "rrlrrrr"))]


def _keys_table(plan: StepPlan, rank: RankPlan) -> list[str]:
    lens = {ratio: shard_lens(plan, rank.dcp_rank, ratio) for ratio in plan.shards}
    held = {ratio: after.tolist() for ratio, (_, after) in lens.items()}
    written = {ratio: (after - before).tolist() for ratio, (before, after) in lens.items()}
    names = ["keys" if ratio == 1 else f"keys/{ratio}" for ratio in plan.shards]
    slots = {ratio: new_slots(plan, rank, ratio) for ratio in plan.shards if plan.batch.block_tables is not None}
    cells = []
    for i, req in enumerate(plan.batch.req_ids.tolist()):
        cells.append([str(req), *(count(keys[i]) for keys in (*held.values(), *written.values()))])
        cells[i] += [lines[i] for lines in slots.values()]
    header = [
        "request",
        *names,
        *(f"new {name}" for name in names),
        *(f"slots of new {name}" for name in names if slots),
    ]
    total = size(cache_bytes(plan, {ratio: sum(lens) for ratio, lens in held.items()}))
    title = f"Keys it stores, this step's included: {total} over all layers"
    align = "r" * (len(header) - len(slots)) + "l" * len(slots)
    return [title, *indent(table(header, shorten(cells, MAX_ROWS), align))]


def new_slots(plan: StepPlan, rank: RankPlan, ratio: int) -> list[str]:
    """For each request the cache slots of the keys that a rank writes, or why there are none."""
    try:
        stored = stored_keys(plan, rank, ratio)
    except PlanError as error:
        return [str(error)] + [""] * (plan.batch.num_reqs - 1)
    assert stored.slot is not None
    return [slots_text(stored.slot[stored.req == req]) for req in range(plan.batch.num_reqs)]


def slots_text(slots: IntArray) -> str:
    """Runs of slots, the first few.  18 19 20 64 -> 18..20 64"""
    starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1)
    runs = np.split(slots, starts[1:]) if len(slots) else []
    shown = [f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:MAX_RUNS]]
    return " ".join(shown + ["..."] * (len(runs) > MAX_RUNS))


# ---- chunks and collectives ------------------------------------------------------------------------------------------


def _chunk_tables(plan: StepPlan, rank: RankPlan) -> Iterator[str]:
    """A table for each compress ratio whose keys are gathered and scored."""
    together = plan.topology.dcp > 1 or plan.topology.pcp == 1
    whose = "the same on all ranks" if together else f"rank {rank.rank}'s; every PCP rank cuts its own"
    for ratio, chunks in rank.chunks.items():
        keys = "1 key a token" if ratio == 1 else f"1 key for {ratio} tokens"
        yield ""
        yield (
            f"Prefill chunks, {keys} ({whose}). Workspace {plan.budget.workspace_keys(ratio):,} keys, "
            f"logits {size(plan.budget.logits_bytes)}"
        )
        if not chunks:
            yield "  none: no prefill row with keys"
            continue
        cells = [_chunk_cells(plan, rank, i, chunk, ratio) for i, chunk in enumerate(chunks)]
        header = ["chunk", "requests", "keys of each", "gathered", "of workspace"]
        header += ["query tokens", "runs of", "logits a run", "of budget"]
        yield from indent(table(header, shorten(cells, MAX_ROWS), "rlrrrrrrr"))


def _chunk_cells(plan: StepPlan, rank: RankPlan, i: int, chunk: Chunk, ratio: int) -> list[str]:
    rows = rank.rows
    reqs = rows.req[rows.num_decodes + chunk.row_start : rows.num_decodes + chunk.row_stop]
    names = plan.batch.req_ids[np.unique(reqs)].tolist()
    logits = 4 * chunk.peak_logits
    return [
        str(i),
        numbers(names),
        f"[{chunk.key_start}:{chunk.key_stop})",
        count(chunk.num_keys),
        share(chunk.num_keys, plan.budget.workspace_keys(ratio)),
        count(chunk.num_queries),
        f"{chunk.num_runs} x {min(chunk.run, chunk.num_queries):,}",
        size(logits),
        share(logits, plan.budget.logits_bytes),
    ]


def _collective_table(plan: StepPlan) -> list[str]:
    cells = []
    for layer, collectives in zip(plan.model.layers, plan.collectives.layers, strict=True):
        for collective in collectives:
            cells.append((layer.kind, layer.num_layers, collective))
    cells += [("step", 1, collective) for collective in plan.collectives.step]
    if not cells:
        return ["Collectives: none"]
    rows = [
        [
            kind,
            c.op,
            c.group,
            c.what,
            f"{c.elements:,} {c.dtype}",
            str(c.times),
            size(c.bytes),
            str(num_layers),
            size(c.bytes * num_layers),
        ]
        for kind, num_layers, c in cells
    ]
    header = ["layer", "operation", "group", "data", "a rank puts in", "times", "bytes", "layers", "all layers"]
    return ["Collectives, in order within each kind of layer", *indent(table(header, shorten(rows, 40), "llllrrrrr"))]


def _traffic_table(plan: StepPlan) -> list[str]:
    traffic = step_traffic(plan.collectives, plan.model)
    rows = [[f"{op} over {group}", count(t.calls), size(t.bytes)] for (op, group), t in traffic.items()]
    if not rows:
        return []
    total = sum(t.calls for t in traffic.values()), sum(t.bytes for t in traffic.values())
    rows.append(["total", count(total[0]), size(total[1])])
    return [
        f"All layers, what one rank puts in{stages_text(plan.topology)}",
        *indent(table(["", "calls", "bytes"], rows, "lrr")),
    ]


def numbers(values: list[int]) -> str:
    """Numbers, with steady steps drawn together.  0 1 2 3 -> 0..3    0 4 8 12 -> 0, 4 .. 12    0 2 1 3 as they are"""
    if len(values) > 2:
        step = values[1] - values[0]
        if step == 1 and values == list(range(values[0], values[-1] + 1)):
            return f"{values[0]}..{values[-1]}"
        if step > 1 and values == list(range(values[0], values[-1] + 1, step)):
            return f"{values[0]}, {values[1]} .. {values[-1]}"
    if len(values) > 8:
        return f"{' '.join(map(str, values[:6]))} ... {values[-1]}"
    return " ".join(map(str, values))
