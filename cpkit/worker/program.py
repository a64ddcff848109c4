"""The rank program: steps in sequence over persistent caches, one layer of each kind, collectives held to the plan.

batch ─► plan ─► layer ─► layer ─► hidden rows, in batch order
                 each: cpkit/worker/layer_step.py; after each the ledger is compared with the plan's list
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpkit.comm.base import Comm
from cpkit.comm.key_gather import check_gather, make_key_gather
from cpkit.comm.ledger import Total, compare
from cpkit.comm.patience import TIMEOUT_S
from cpkit.errors import ConfigError, DesyncError
from cpkit.planner.collectives import Collective
from cpkit.settings import StepSettings
from cpkit.step import StepPlan
from cpkit.worker.clock import StageClock
from cpkit.worker.inputs import InputSource, LayerInputs
from cpkit.worker.layer_state import Pool, make_state
from cpkit.worker.layer_step import LayerResult, run_layer_step
from cpkit.worker.places import Places
from cpkit.worker.restore import gather_hidden

Totals = dict[tuple[str, str, str], Total]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a rank has after a step.

    places: its part of the plan. inputs, layers: of each layer, in the model's order. hidden: [tokens of the batch,
    hidden_size] bf16, in batch order.
    """

    places: Places
    inputs: tuple[LayerInputs, ...]
    layers: tuple[LayerResult, ...]
    hidden: torch.Tensor


class RankProgram:
    """One rank's program; the model's layers run one after another, one of each kind that the model lists.

    source: gives a rank its activations. backend: of kernels that have both, torch or triton. gather: how index keys of
    all shards are gathered, collective or symmetric (comm/key_gather.py); timeout_s: how long the latter waits for a
    rank. clock: seconds by stage so far. collectives: calls and bytes so far, by (op, group, what): what was issued is
    held to the plan's list layer by layer, so this is either. Raises ConfigError for a model, a world, a backend or a
    gather that cannot be run, in run_step PlanError for a batch, and DesyncError where the ranks, or a rank and its
    plan, disagree.
    """

    def __init__(
        self,
        comm: Comm,
        settings: StepSettings,
        pool: Pool,
        source: InputSource,
        backend: str = "torch",
        *,
        gather: str = "collective",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if settings.topology.dp * settings.topology.pp > 1:
            raise ConfigError(
                f"dp={settings.topology.dp} pp={settings.topology.pp}: a run executes one layer of one replica, whose "
                "ranks are pcp * tp; leave dp and pp at 1"
            )
        self.comm = comm
        self.settings = settings
        self.source = source
        self.clock = StageClock(comm.device)
        self.collectives: Totals = {}
        check_gather(gather)
        gathered = _gathered_keys(settings)
        if gather != "collective" and not gathered:
            raise ConfigError(
                f"gather {gather}: pcp={settings.topology.pcp} dcp={settings.topology.dcp} and these layers gather no "
                "index keys (layers with an indexer do, with pcp > 1 and dcp > 1); leave gather out"
            )
        self._gathers = {
            dim: make_key_gather(comm, gather, dim=dim, max_keys=max_keys, backend=backend, timeout_s=timeout_s)
            for dim, max_keys in gathered.items()
        }
        self.layers = [
            make_state(
                layer, settings, pool, comm, backend, self._gathers.get(layer.index.head_dim if layer.index else 0)
            )
            for layer in settings.model.layers
        ]

    def run_step(self, plan: StepPlan) -> StepResult:
        """Run a planned step; every rank of the replica enters with a plan of the same batch."""
        places = Places(plan, plan.rank(self.comm.rank), self.comm.device)
        all_inputs: list[LayerInputs] = []
        results: list[LayerResult] = []
        selection: torch.Tensor | None = None
        for number, state in enumerate(self.layers):
            with self.clock.stage("inputs"):
                inputs = self.source.layer_inputs(places, state.layer, number)
            result = run_layer_step(self.comm, places, state, inputs, self.clock, earlier=selection)
            self._hold_to_plan(plan.collectives.layers[number], f"layer {number} ({state.layer.kind})")
            selection = result.selection if state.layer.index else selection
            all_inputs.append(inputs)
            results.append(result)
        with self.clock.stage("restore"):
            own = self.source.hidden(places, self.settings.model.hidden_size)
            hidden = gather_hidden(self.comm, places, own)
        self._hold_to_plan(plan.collectives.step, "the end of the step")
        for gather in self._gathers.values():
            gather.check()
        return StepResult(places, tuple(all_inputs), tuple(results), hidden)

    def _hold_to_plan(self, planned: Sequence[Collective], where: str) -> None:
        """Raise DesyncError unless this rank issued what its plan lists, in that order and size."""
        issued = self.comm.ledger.take()
        difference = compare(issued, planned)
        if difference is not None:
            raise DesyncError(f"rank {self.comm.rank}, {where}: {difference}")
        for one in issued:
            key = one.op, one.group, one.what
            before = self.collectives.get(key, Total(0, 0))
            self.collectives[key] = Total(before.calls + 1, before.bytes + one.bytes)


def _gathered_keys(settings: StepSettings) -> dict[int, int]:
    """Most index keys that a rank sends for a workspace, by values of a key; none where prefills gather no keys."""
    topology = settings.topology
    if topology.pcp == 1 or topology.dcp == 1:
        return {}
    found: dict[int, int] = {}
    for layer in settings.model.layers:
        if layer.index and layer.runs_index:
            dim, keys = layer.index.head_dim, settings.budget.workspace_keys(layer.index.ratio) // topology.dcp
            found[dim] = max(found.get(dim, 0), keys)
    return found
