"""Device memory beside weights and caches: workspace, logits, and what collectives put in and fill.

Workspace and logits are the budget's. What collectives hold is read from plans of the two largest steps: a prefill of
max_num_batched_tokens that ends a request of maximal length, and max_num_seqs decodes of maximal length.
"""

from dataclasses import dataclass

from cpkit.arrays import ceil_div
from cpkit.batch import Batch
from cpkit.budget import Budget
from cpkit.model import Model
from cpkit.planner.collectives import StepCollectives
from cpkit.settings import StepSettings
from cpkit.topology import Topology


@dataclass(frozen=True, slots=True)
class Buffer:
    """bytes: on one rank; why: the product that they are, with its values."""

    name: str
    bytes: int
    why: str


def list_buffers(
    model: Model,
    topology: Topology,
    budget: Budget,
    *,
    max_model_len: int,
    replicates_index: bool,
    merge: str,
    num_workspaces: int,
) -> tuple[Buffer, ...]:
    """Buffers of one rank that are not empty, shared by all layers: each as large as its largest use."""
    fixed = [
        _workspace(model, budget, num_workspaces),
        *_logits(model, topology, budget, max_model_len, replicates_index),
    ]
    settings = StepSettings(topology, model, budget, merge=merge)
    held: dict[str, tuple[int, str]] = {}
    for step, batch in _largest_steps(budget, max_model_len).items():
        for what, size, why in _held(settings.plan(batch, 0).collectives, topology):
            if replicates_index and what == "candidates":
                continue  # every rank selects among all keys
            if size > held.get(what, (0, ""))[0]:
                held[what] = size, f"{why}, {step}"
    return tuple(
        buffer for buffer in [*fixed, *(Buffer(what, size, why) for what, (size, why) in held.items())] if buffer.bytes
    )


def _workspace(model: Model, budget: Budget, num_workspaces: int) -> Buffer:
    """Indexer keys of a prefill chunk, and of the next where it is filled meanwhile."""
    rows = {
        (budget.workspace_keys(layer.index.ratio), layer.index.key_bytes)
        for layer in model.layers
        if layer.index and layer.runs_index
    }
    keys, key_bytes = max(rows, key=lambda row: row[0] * row[1], default=(0, 0))
    times = f"{num_workspaces} x " if num_workspaces > 1 else ""
    return Buffer("index workspace", num_workspaces * keys * key_bytes, f"{times}{keys:,} keys x {key_bytes} B")


def _logits(
    model: Model, topology: Topology, budget: Budget, max_model_len: int, replicates_index: bool
) -> tuple[Buffer, Buffer]:
    """fp32 logits of a prefill run, and of all decodes over a rank's share of the longest context."""
    ratios = [layer.index.ratio for layer in model.layers if layer.index and layer.runs_index]
    if not ratios:
        return Buffer("prefill logits", 0, ""), Buffer("decode logits", 0, "")
    tokens, most_keys = budget.max_num_batched_tokens, budget.workspace_keys(min(ratios))
    prefill = min(budget.logits_bytes, 4 * tokens * most_keys)
    shards = 1 if replicates_index else topology.dcp
    rows = budget.max_num_seqs * budget.decode_threshold
    if topology.pcp > 1 and topology.dcp == 1:
        rows = ceil_div(rows, topology.pcp)  # decodes are dealt out over PCP ranks
    keys = ceil_div(max_model_len, min(ratios) * shards)
    return (
        Buffer("prefill logits", prefill, f"at most {tokens:,} tokens x {most_keys:,} keys x 4 B, within the budget"),
        Buffer("decode logits", 4 * rows * keys, f"{rows:,} rows x {keys:,} keys x 4 B"),
    )


def _largest_steps(budget: Budget, max_model_len: int) -> dict[str, Batch]:
    """The steps that the largest collectives belong to."""
    prompt = min(budget.max_num_batched_tokens, max_model_len)
    num_decodes = min(budget.max_num_seqs, budget.max_num_batched_tokens // budget.decode_threshold)
    query = min(budget.decode_threshold, max_model_len)
    steps = {"a prefill": Batch.from_lens([max_model_len], [prompt], [max_model_len])}
    if num_decodes and max_model_len > query:
        decodes = [max_model_len] * num_decodes
        steps["decodes"] = Batch.from_lens(decodes, [query] * num_decodes, [1] * num_decodes)
    return steps


def _held(collectives: StepCollectives, topology: Topology) -> list[tuple[str, int, str]]:
    """What each collective puts in and what it leaves, in bytes on one rank."""
    found = []
    for collective in [*(c for layer in collectives.layers for c in layer), *collectives.step]:
        ranks = getattr(topology, collective.group)
        put = collective.bytes // collective.times
        size = put * (1 + ranks) if collective.op == "all_gather" else 2 * put
        if collective.op == "reduce_scatter":
            size = put + ceil_div(put, ranks)
        found.append((collective.what, size, f"{collective.op} over {collective.group} of {put:,} B a rank"))
    return found
