"""Bounded: no step, and no chunk of it, holds more than the budget allows.

The workspace is counted chunk by chunk. Who gathers a chunk while the one before it is scored holds two of them, each
within workspace_tokens: twice that, and never more (comm/key_gather.py; sizing/memory/buffers.py counts the bytes).
"""

from collections.abc import Iterator

from cpkit.promises.compare import by_key
from cpkit.promises.held import Held, Replica
from cpkit.promises.violation import Violation
from cpkit.step import StepPlan


def bounded(replica: Replica) -> Iterator[Violation]:
    """Tokens and requests of the step, then workspace and logits of every chunk."""
    yield from _step(replica.lead, tuple(held.number for held in replica.ranks))
    for alike in by_key(replica.ranks, lambda held: held.own):
        yield from _chunks(alike[0], tuple(held.number for held in alike))


def _step(plan: StepPlan, ranks: tuple[int, ...]) -> Iterator[Violation]:
    tokens, most_tokens = sum(plan.batch.query_lens.tolist()), plan.budget.max_num_batched_tokens
    if tokens > most_tokens:
        yield Violation("bounded", "tokens", ranks, f"{tokens} query tokens, max_num_batched_tokens={most_tokens}")
    reqs, most_reqs = len(plan.batch.query_lens), plan.budget.max_num_seqs
    if reqs > most_reqs:
        yield Violation("bounded", "requests", ranks, f"{reqs} requests, max_num_seqs={most_reqs}")


def _chunks(held: Held, ranks: tuple[int, ...]) -> Iterator[Violation]:
    """The first chunk of each ratio over its workspace, and the first over the logits; gathered keys count padded."""
    budget = held.plan.budget
    for ratio, chunks in held.rank.chunks.items():
        gathers = held.rank.gathers.get(ratio, ())
        keys = [chunk.num_keys for chunk in chunks]
        for i, gather in enumerate(gathers[: len(keys)]):
            keys[i] = max(keys[i], sum(gather.shard_keys.tolist()) * gather.dcp_size)
        most_keys = budget.workspace_keys(ratio)
        if over := [i for i, num_keys in enumerate(keys) if num_keys > most_keys]:
            detail = f"ratio {ratio}, chunk {over[0]} gathers {keys[over[0]]} keys, the workspace holds {most_keys}"
            yield Violation("bounded", "workspace", ranks, detail)
        logits = [min(chunk.run, chunk.num_queries) * num_keys for chunk, num_keys in zip(chunks, keys, strict=True)]
        if over := [i for i, peak in enumerate(logits) if peak > budget.logits]:
            detail = (
                f"ratio {ratio}, chunk {over[0]} scores {logits[over[0]]} logits at once, the budget is {budget.logits}"
            )
            yield Violation("bounded", "logits", ranks, detail)
