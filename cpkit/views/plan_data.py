"""A step plan as plain data: what `cpkit plan --json` prints. Lists and numbers only, under the plan's own names."""

from dataclasses import asdict
from typing import Any

import cpkit
from cpkit.planner.collectives import Collective
from cpkit.planner.rows import Rows
from cpkit.step import RankPlan, StepPlan
from cpkit.views.materialize import shard_lens
from cpkit.views.traffic import step_traffic

FORMAT = "cpkit-plan-1"


def plan_data(plan: StepPlan) -> dict[str, Any]:
    """Everything of a plan; grows with requests and ranks, not with tokens."""
    return {**shared_data(plan), "ranks": [rank_data(plan, rank) for rank in plan.ranks]}


def shared_data(plan: StepPlan) -> dict[str, Any]:
    """What all ranks of the step share."""
    traffic = step_traffic(plan.collectives, plan.model)
    return {
        "format": FORMAT,
        "cpkit": cpkit.__version__,
        "model": plan.model.name,
        "topology": asdict(plan.topology),
        "budget": asdict(plan.budget),
        "partition": plan.partition.strategy,
        "merge": plan.merge,
        "batch": plan.batch.to_json(),
        "num_tokens": plan.batch.num_tokens,
        "padded": plan.padded,
        "pcp_tokens": plan.partition.num_tokens.tolist(),
        "shard_keys": {str(ratio): shards.shard_keys.tolist() for ratio, shards in plan.shards.items()},
        "collectives": {
            "layers": [
                {"kind": layer.kind, "num_layers": layer.num_layers, "list": [collective_data(c) for c in collectives]}
                for layer, collectives in zip(plan.model.layers, plan.collectives.layers, strict=True)
            ],
            "step": [collective_data(c) for c in plan.collectives.step],
        },
        "traffic": [
            {"op": op, "group": group, "calls": total.calls, "bytes": total.bytes}
            for (op, group), total in traffic.items()
        ],
        "digests": plan.digests(),
    }


def collective_data(collective: Collective) -> dict[str, Any]:
    """The fields of a collective, and its bytes."""
    return {**asdict(collective), "bytes": collective.bytes}


def rank_data(plan: StepPlan, rank: RankPlan) -> dict[str, Any]:
    """One rank's rows, keys and chunks; by compress ratio where there may be several."""
    lens = {ratio: shard_lens(plan, rank.dcp_rank, ratio) for ratio in plan.shards}
    return {
        **rank_place(plan, rank),
        "rows": rows_data(rank.rows),
        "stored_keys": {str(ratio): after.tolist() for ratio, (_, after) in lens.items()},
        "new_keys": {str(ratio): (after - before).tolist() for ratio, (before, after) in lens.items()},
        **chunk_data(rank),
    }


def rank_place(plan: StepPlan, rank: RankPlan) -> dict[str, int]:
    """A rank and its places in its groups."""
    coords = plan.topology.coords(rank.rank)
    return {"rank": rank.rank, "tp_rank": coords.tp, "pcp_rank": rank.pcp_rank, "dcp_rank": rank.dcp_rank}


def chunk_data(rank: RankPlan) -> dict[str, Any]:
    """A rank's chunks and their gathers, by compress ratio."""
    return {
        "chunks": {str(ratio): [asdict(chunk) for chunk in chunks] for ratio, chunks in rank.chunks.items()},
        "gathers": {
            str(ratio): [
                {"first_local": gather.first_local, "shard_keys": gather.shard_keys.tolist()} for gather in gathers
            ]
            for ratio, gathers in rank.gathers.items()
        },
    }


def rows_data(rows: Rows) -> dict[str, Any]:
    """Rows as lists, one entry a row."""
    return {
        "req": rows.req.tolist(),
        "start_pos": rows.start_pos.tolist(),
        "stride": rows.stride.tolist(),
        "num_tokens": rows.num_tokens.tolist(),
        "seq_lens": rows.seq_lens.tolist(),
        "is_prefilling": rows.is_prefilling.tolist(),
        "num_decodes": rows.num_decodes,
    }
