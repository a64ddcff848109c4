"""The steps that a run executes: of a batch file, of prompts and their decodes, or of a trace.

All come with block tables, and with what names their tokens, so that a prefix that two requests share is the same.
Each takes `room`, bytes that the caches of one rank may take (None: all memory of this machine), and raises InputError
for steps whose blocks do not fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from cpkit.activations.content import SHARED, Content
from cpkit.arrays import IntArray, ceil_div
from cpkit.batch import Batch
from cpkit.errors import InputError
from cpkit.run.room import check_room, rank_room
from cpkit.settings import StepSettings
from cpkit.worker.layer_state import Pool
from cpkit.workload.prefix_cache import block_keys
from cpkit.workload.request import Request, Trace
from cpkit.workload.scheduler import Scheduler


@dataclass(frozen=True, slots=True, eq=False)
class RunSteps:
    """batches: the steps in order, each with block tables. has_history: what was computed before the first step is
    written to the caches beforehand (a batch file); else every key is computed by an earlier step of the run.
    """

    name: str
    batches: tuple[Batch, ...]
    content: Content
    pool: Pool
    has_history: bool = False


def batch_steps(batch: Batch, settings: StepSettings, name: str, *, room: int | None = None) -> RunSteps:
    """One step. Requests without block tables get blocks of their own; blocks that several name hold equal tokens."""
    virtual_block = settings.topology.virtual_block
    if not batch.num_reqs:
        raise InputError(f"{name}: a batch without requests runs nothing")
    if batch.block_tables is None:
        _check(name, int(_num_blocks(batch, virtual_block).sum()) + 1, settings, room)
        batch = _with_tables(batch, virtual_block)
    tables = batch.block_tables
    assert tables is not None, "given or made above"
    _check(name, int(tables.max(initial=0)) + 1, settings, room)
    names = {int(req): row.astype(np.int64) for req, row in zip(batch.req_ids, tables, strict=True)}
    pool = Pool(num_blocks=int(tables.max(initial=0)) + 1, max_blocks=max(tables.shape[1], 1))
    return RunSteps(name, (batch,), Content(virtual_block, names), pool, has_history=True)


def named_by_request(steps: RunSteps) -> RunSteps:
    """The same steps with every token named by its request, as activations of a file are.

    Raises InputError where requests share a block, whose tokens then have no one name.
    """
    tables = steps.batches[0].block_tables
    assert tables is not None, "steps have block tables"
    ids, counts = np.unique(np.concatenate([np.unique(row) for row in tables]), return_counts=True)
    shared = ids[(counts > 1) & (ids > 0)].tolist()
    if shared:
        raise InputError(f"{steps.name}: requests share blocks {shared[:8]}, but activations of a file are by request")
    return replace(steps, content=Content(steps.content.virtual_block))


def prompt_steps(
    prompt_lens: Sequence[int],
    num_decodes: int,
    settings: StepSettings,
    seed: int,
    max_model_len: int | None = None,
    *,
    room: int | None = None,
) -> RunSteps:
    """Prompts that arrive together, prefilled within the budget, then num_decodes output tokens each."""
    if not prompt_lens or min(prompt_lens) < 1 or num_decodes < 0:
        raise InputError(
            f"prompt lengths {list(prompt_lens)} with {num_decodes} decode steps: give at least one prompt of at least "
            "one token, and decode steps from 0 on"
        )
    longest = max(prompt_lens) + num_decodes + 1
    if max_model_len is not None and longest > max_model_len:
        raise InputError(
            f"a prompt of {max(prompt_lens)} tokens and the {num_decodes + 1} behind it are {longest}, above "
            f"--max-model-len {max_model_len}"
        )
    drafts = settings.budget.num_speculative_tokens
    blocks = sum(ceil_div(length + num_decodes + drafts + 1, settings.topology.virtual_block) for length in prompt_lens)
    _check("--prompt-lens", blocks + 1, settings, room)
    requests = tuple(Request(i, 0.0, length, num_decodes + 1) for i, length in enumerate(prompt_lens))
    trace = Trace("prompts", "lengths", requests)
    return trace_steps(
        trace, settings, num_blocks=blocks + 1, max_steps=None, seed=seed, max_model_len=max_model_len, room=room
    )


def trace_steps(
    trace: Trace,
    settings: StepSettings,
    *,
    num_blocks: int | None,
    max_steps: int | None,
    seed: int,
    max_model_len: int | None = None,
    room: int | None = None,
) -> RunSteps:
    """The first steps of a trace through the scheduler, which leaves out requests beyond max_model_len.

    num_blocks: None for room for its four longest requests.
    """
    topology, drafts = settings.topology, settings.budget.num_speculative_tokens
    lens = sorted((request.prompt_len + request.output_len + drafts for request in trace.requests), reverse=True)
    if num_blocks is None:
        num_blocks = 1 + sum(ceil_div(length, topology.virtual_block) for length in lens[:4])
    _check(trace.name, num_blocks, settings, room)
    scheduler = Scheduler(
        trace,
        topology,
        settings.budget,
        num_kv_blocks=num_blocks,
        max_model_len=lens[0] if max_model_len is None else max_model_len,
        seed=seed,
    )
    batches = tuple(step.batch for step in islice(scheduler, max_steps))
    if not batches:
        raise InputError(f"{trace.name}: no step to run: every request was refused ({dict(scheduler.stats.refused)})")
    content = Content(topology.virtual_block, _prompt_names(trace, batches, topology.virtual_block))
    max_blocks = max(batch.block_tables.shape[1] for batch in batches if batch.block_tables is not None)
    return RunSteps(trace.name, batches, content, Pool(num_blocks, max_blocks))


def _check(name: str, num_blocks: int, settings: StepSettings, room: int | None) -> None:
    room = rank_room("cpu", 1) if room is None else room
    check_room(name, num_blocks, room, settings.model, settings.topology)


def _num_blocks(batch: Batch, virtual_block: int) -> IntArray:
    """[num_reqs] int64, blocks that each request gets; one without tokens gets one, too."""
    counts: IntArray = np.maximum(ceil_div(batch.seq_lens, virtual_block), 1)
    return counts


def _with_tables(batch: Batch, virtual_block: int) -> Batch:
    counts = _num_blocks(batch, virtual_block)
    first = 1 + np.cumsum(counts) - counts
    tables = [list(range(start, start + count)) for start, count in zip(first.tolist(), counts.tolist(), strict=True)]
    return Batch.from_json({**batch.to_json(), "block_tables": tables})


def _prompt_names(trace: Trace, batches: Iterable[Batch], virtual_block: int) -> dict[int, IntArray]:
    """Names of the whole prompt blocks of the requests that run, from their prefix hashes."""
    used = {req for batch in batches for req in batch.req_ids.tolist()}
    keys = {req: block_keys(trace.requests[req], virtual_block) for req in sorted(used)}
    return {req: np.array([key % SHARED for key in named], np.int64) for req, named in keys.items() if named}
