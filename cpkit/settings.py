"""Everything that decides a step's plan besides its batch and the rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from cpkit.batch import Batch
from cpkit.budget import Budget
from cpkit.model import Model
from cpkit.step import StepPlan, plan_step
from cpkit.topology import Topology


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What every rank of a deployment is started with; the fields are plan_step's arguments."""

    topology: Topology
    model: Model
    budget: Budget
    partition: str = "head_tail"
    merge: str = "ag_rs"
    shard_decode_requests: bool | None = None

    def plan(self, batch: Batch, rank: int | Sequence[int] | None = None) -> StepPlan:
        """Plan one step under these settings, for one rank, several, or all ranks of the first replica."""
        return plan_step(
            batch,
            self.topology,
            self.model,
            self.budget,
            rank=rank,
            partition=self.partition,
            merge=self.merge,
            shard_decode_requests=self.shard_decode_requests,
        )
