"""A broken promise: which one, by which ranks, and in words."""

from collections.abc import Sequence
from dataclasses import dataclass

RULES = {
    "cover": {
        "place": "a rank stands where its number says, in its PCP and DCP groups",
        "rows": "a rank's rows contradict neither themselves nor the batch",
        "query_tokens": "each query token is computed once in a PCP group, a replicated one once on every rank",
        "layout": "the padded layout exists and holds each rank's tokens in the order of its rows",
        "restore": "every token is restored from a place that holds it",
        "kv_writer": "one rank writes the KV of each query token",
        "stored_keys": "each new key is stored once in a DCP group, and nothing else is",
        "slots": "each stored key has a slot of its own, next in turn in the right block of its request",
        "spans": "the key spans of a prefill row tile the keys it sees",
        "last_span": "a chunk says whether it is the last of its rows",
        "runs": "the query runs of a chunk tile its rows' query tokens",
        "chunk_keys": "a chunk plans its rows' keys",
        "gathers": "each gathered chunk has a region a request, with room for its keys on every rank",
    },
    "agree": {
        "seq_lens": "same batch",
        "query_lens": "same batch",
        "prompt_lens": "same batch",
        "req_ids": "same batch",
        "block_tables": "same batch",
        "topology": "same world",
        "model": "same model",
        "budget": "same limits",
        "merge": "same way to merge partial outputs",
        "partition": "same cut of the query tokens",
        "padded": "same number of tokens sent by each PCP rank",
        "shards": "same placement of keys",
        "collectives": "same collectives: operation, group, dtype, size and order",
        "chunks": "same chunk bounds in a DCP group",
        "gathers": "same padded extents in a DCP group",
    },
    "bounded": {
        "tokens": "query tokens of a step",
        "requests": "requests of a step",
        "workspace": "keys that a chunk gathers",
        "logits": "logits that a run scores",
    },
}
"""Every promise and its rules, with what holds when the rule is kept."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One promise that a planned step breaks.

    promise, rule: what is broken, names from RULES. ranks: in the world, those that break it
    (agree: those that differ from most). detail: the values, and the first place where they are wrong.
    """

    promise: str
    rule: str
    ranks: tuple[int, ...]
    detail: str

    def __post_init__(self) -> None:
        assert self.rule in RULES[self.promise]

    def __str__(self) -> str:
        return f"{self.promise}/{self.rule}: {show_ranks(self.ranks)}: {self.detail}"


def show_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message, the first eight of many.  (3,) -> rank 3"""
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"
