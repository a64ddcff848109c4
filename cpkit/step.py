"""From a batch to the plan of a step, for one rank or for all: the entry of the planner.

Planning is pure: every rank calls plan_step with its own number and arrives at the same chunks, padded sizes and
collectives, because those follow from the batch alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpkit.arrays import IntArray, ceil_div
from cpkit.batch import Batch
from cpkit.budget import Budget
from cpkit.digest import digest, repeated_digest
from cpkit.errors import ConfigError, PlanError
from cpkit.model import Model
from cpkit.planner.chunks import Chunk, split_chunks, widen
from cpkit.planner.collectives import StepCollectives, StepShape, list_collectives
from cpkit.planner.gather import GatherPlan, plan_gather
from cpkit.planner.order import request_row_bounds
from cpkit.planner.partition import STRATEGIES, Partition, partition_queries
from cpkit.planner.rows import Rows, rank_rows
from cpkit.planner.shard import Shards, shard_kv
from cpkit.planner.slots import NULL_BLOCK
from cpkit.topology import Topology

_REPEATED = frozenset({"topology", "model", "budget", "collectives"})
"""Fields of a plan that are often equal from step to step."""


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """One rank's part of a step.

    rank: in the world; pcp_rank, dcp_rank: in its groups. rows: its query tokens, decodes first.
    chunks, gathers: of its prefill rows (row 0 is rows.num_decodes), by keys' compress ratio; gathers only with
    pcp > 1 and dcp > 1, one for each chunk.
    """

    rank: int
    pcp_rank: int
    dcp_rank: int
    rows: Rows
    chunks: dict[int, tuple[Chunk, ...]]
    gathers: dict[int, tuple[GatherPlan, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A planned step: what all ranks share, and the ranks that were asked for.

    padded: query tokens every PCP rank sends. shards: by compress ratio, for every paged cache of the model.
    """

    batch: Batch
    topology: Topology
    model: Model
    budget: Budget
    merge: str
    partition: Partition
    shards: dict[int, Shards]
    padded: int
    collectives: StepCollectives
    ranks: tuple[RankPlan, ...]

    def rank(self, rank: int) -> RankPlan:
        """The plan of one rank; raises PlanError when the step was planned for others only."""
        for plan in self.ranks:
            if plan.rank == rank:
                return plan
        raise PlanError(f"rank {rank} is not in this plan, which holds {[plan.rank for plan in self.ranks]}")

    def digests(self) -> dict[str, str]:
        """A fingerprint of each field that must be equal on all ranks; they are the same on every machine."""
        batch, lead = self.batch, self.ranks[0]
        shared: dict[str, object] = {
            "seq_lens": batch.seq_lens,
            "query_lens": batch.query_lens,
            "prompt_lens": batch.prompt_lens,
            "req_ids": batch.req_ids,
            "block_tables": batch.block_tables,
            "topology": self.topology,
            "model": self.model,
            "budget": self.budget,
            "merge": self.merge,
            "partition": (self.partition.strategy, self.partition.mode, self.partition.num_tokens),
            "padded": self.padded,
            "shard_keys": [shards.shard_keys for shards in self.shards.values()],
            "collectives": self.collectives,
        }
        if self.topology.dcp > 1:
            shared |= {"chunks": lead.chunks, "gathers": lead.gathers}
        return {name: (repeated_digest if name in _REPEATED else digest)(value) for name, value in shared.items()}


def plan_step(
    batch: Batch,
    topology: Topology,
    model: Model,
    budget: Budget,
    *,
    rank: int | Sequence[int] | None = None,
    partition: str = "head_tail",
    merge: str = "ag_rs",
    shard_decode_requests: bool | None = None,
) -> StepPlan:
    """Plan one step of one replica (pcp * tp ranks).

    rank: one rank, several, or None for all ranks of the first replica. partition: head_tail, head_tail_even,
    contiguous or round_robin. merge: ag_rs or a2a. shard_decode_requests: deal decodes out over the PCP ranks instead
    of replicating them; by default exactly when pcp > 1 and dcp = 1.
    Raises ConfigError for settings, PlanError for a batch or budget that cannot be planned.
    """
    model.check(topology)
    check_limits(batch, budget)
    check_blocks(batch, topology)
    queries = partition_queries(
        batch.query_lens,
        batch.is_prefilling,
        pcp_size=topology.pcp,
        dcp_size=topology.dcp,
        strategy=strategy_for(topology, partition),
        shard_decodes=shard_decode_requests,
    )
    shards = {
        ratio: shard_kv(batch.seq_lens, ratio, dcp_size=topology.dcp, interleave=topology.interleave)
        for ratio in model.slot_ratios
    }
    stage = _Stage(batch, topology, model, budget, queries, shards)
    ranks = stage.rank_plans(wanted_ranks(topology, rank))
    shape = stage.shape(ranks[0])
    collectives = list_collectives(shape, topology, model, merge)
    return StepPlan(batch, topology, model, budget, merge, queries, shards, shape.padded, collectives, ranks)


def check_limits(batch: Batch, budget: Budget) -> None:
    """Refuse a batch that is larger than the budget allows."""
    if batch.num_tokens > budget.max_num_batched_tokens:
        raise PlanError(
            f"{batch.num_tokens} query tokens, but max_num_batched_tokens={budget.max_num_batched_tokens}: "
            "split the step or raise the limit"
        )
    if batch.num_reqs > budget.max_num_seqs:
        raise PlanError(
            f"{batch.num_reqs} requests, but max_num_seqs={budget.max_num_seqs}: split the step or raise the limit"
        )


def check_blocks(batch: Batch, topology: Topology) -> None:
    """Refuse block tables that end before their request's last token, or name the null block for it."""
    tables = batch.block_tables
    if tables is None or not batch.num_reqs:
        return
    needed = ceil_div(batch.seq_lens, topology.virtual_block)
    req = int(needed.argmax())
    if needed[req] > tables.shape[1]:
        raise PlanError(
            f"request {req}: seq_len {int(batch.seq_lens[req])} needs {int(needed[req])} blocks of "
            f"{topology.virtual_block} tokens (block_size x dcp), and its block table has {tables.shape[1]} columns: "
            "give it more blocks, or plan with the block size and dcp that the tables were made for"
        )
    if not needed[req]:
        return
    missing = (tables[np.arange(batch.num_reqs), needed - 1] == NULL_BLOCK) & (needed > 0)
    if missing.any():
        req = int(missing.argmax())
        raise PlanError(
            f"request {req}: block {int(needed[req]) - 1} of its block table is {NULL_BLOCK}, the null block, but its "
            f"seq_len {int(batch.seq_lens[req])} reaches it: allocate a block"
        )


def strategy_for(topology: Topology, partition: str) -> str:
    """The named strategy; with one PCP rank prefills stay whole, which is what contiguous makes of them."""
    if partition not in STRATEGIES:
        raise ConfigError(f"partition {partition!r}: use one of {', '.join(STRATEGIES)}")
    return partition if topology.pcp > 1 else "contiguous"


def wanted_ranks(topology: Topology, rank: int | Sequence[int] | None) -> list[int]:
    """Ranks to plan: those asked for, or all of the first replica."""
    if rank is None:
        return list(range(topology.replica_size))
    ranks = [int(rank)] if isinstance(rank, int | np.integer) else [int(one) for one in rank]
    if not ranks:
        raise PlanError("no ranks to plan: name at least one, or None for all")
    for one in ranks:
        topology.coords(one)
    return ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """What the ranks' plans are made from."""

    batch: Batch
    topology: Topology
    model: Model
    budget: Budget
    queries: Partition
    shards: dict[int, Shards]

    def rank_plans(self, ranks: Sequence[int]) -> tuple[RankPlan, ...]:
        """Plans of the ranks; those of one PCP rank share rows, chunks and gathers."""
        by_pcp: dict[int, tuple[Rows, dict[int, tuple[Chunk, ...]], dict[int, tuple[GatherPlan, ...]]]] = {}
        plans = []
        for rank in ranks:
            pcp_rank = self.topology.coords(rank).pcp
            if pcp_rank not in by_pcp:
                rows = self.rows(pcp_rank)
                chunks = {ratio: self.chunks(rows, ratio) for ratio in self.model.ratios}
                by_pcp[pcp_rank] = rows, chunks, self.gathers(rows, chunks)
            plans.append(RankPlan(rank, pcp_rank, self.topology.dcp_rank(rank), *by_pcp[pcp_rank]))
        return tuple(plans)

    def rows(self, pcp_rank: int) -> Rows:
        segments = self.queries.segments(pcp_rank)
        return rank_rows(self.batch, segments, self.budget.decode_threshold, split_extends=self.topology.pcp > 1)

    def chunks(self, rows: Rows, ratio: int) -> tuple[Chunk, ...]:
        """Chunks of a rank's prefill rows over keys of one ratio; those without any key are left out.

        With pcp > 1 and dcp > 1 whole requests are chunked, by sizes that are the same on every rank.
        """
        prefill = slice(rows.num_decodes, None)
        req = rows.req[prefill]
        if not rows.total_tokens or not len(req):
            return ()
        dcp, turn = self.topology.dcp, self.shards[ratio].interleave
        together = self.topology.pcp > 1 and dcp > 1
        if together:
            bounds = request_row_bounds(req)
            req = req[bounds[:-1]]
            query_lens = self.queries.largest_share()[req]
            context_keys = self.gathered_shards(ratio).shard_keys[req] * dcp
        else:
            query_lens, context_keys = rows.num_tokens[prefill], rows.seq_lens[prefill] // ratio
        chunks = split_chunks(
            query_lens,
            context_keys,
            workspace_keys=self.budget.workspace_keys(ratio),
            max_logits=self.budget.logits,
            span_unit=dcp * turn,
        )
        return tuple(chunk for chunk in (widen(chunks, bounds) if together else chunks) if chunk.num_keys)

    def gathers(self, rows: Rows, chunks: dict[int, tuple[Chunk, ...]]) -> dict[int, tuple[GatherPlan, ...]]:
        """The gather of each chunk, where keys are gathered at all."""
        if self.topology.pcp == 1 or self.topology.dcp == 1:
            return dict.fromkeys(chunks, ())
        req = rows.req[rows.num_decodes :]
        return {ratio: self.gathers_of(chunks[ratio], req, self.gathered_shards(ratio)) for ratio in chunks}

    def gathers_of(self, chunks: tuple[Chunk, ...], req: IntArray, shards: Shards) -> tuple[GatherPlan, ...]:
        """The gather of each chunk over keys of one ratio; req: [prefill rows] int64, request of each row."""
        if not chunks:
            return ()  # nor is there a request where an idle rank of an empty batch has its one row
        shard_keys = shards.shard_keys[req]
        return tuple(
            plan_gather(chunk, req, shard_keys, dcp_size=shards.dcp_size, interleave=shards.interleave)
            for chunk in chunks
        )

    def gathered_shards(self, ratio: int) -> Shards:
        """Shards as gathers count them: an incomplete pool of a kpool layer is one more, as its tokens are attended."""
        if ratio not in self.model.pool_ratios:
            return self.shards[ratio]
        topology = self.topology
        lens = self.batch.seq_lens + (ratio - 1)
        return shard_kv(lens, ratio, dcp_size=topology.dcp, interleave=topology.interleave)

    def shape(self, lead: RankPlan) -> StepShape:
        """Sizes that the collectives follow from. Under DCP every rank has the lead's decode rows and chunks."""
        padded = self.queries.padded
        return StepShape(
            padded=padded,
            padded_kv=padded - self.queries.num_known(self.batch.is_prefilling),
            num_tokens=self.batch.num_tokens,
            num_decode_tokens=lead.rows.num_decode_tokens if self.topology.dcp > 1 else 0,
            chunks=lead.chunks,
            gathers=lead.gathers,
        )
