"""Cover: a rank's rows say what the batch says, so that tokens and keys can be counted from them."""

from collections.abc import Iterator

import numpy as np

from cpkit.arrays import BoolArray
from cpkit.promises.compare import by_key, first
from cpkit.promises.held import Held, Replica
from cpkit.promises.violation import Violation


def cover_rows(replica: Replica) -> Iterator[Violation]:
    """Ranks that stand at another place than their number says, or whose rows contradict themselves or the batch."""
    topology = replica.lead.topology
    for held in replica.ranks:
        place = topology.coords(held.number).pcp, topology.dcp_rank(held.number)
        if place != (held.rank.pcp_rank, held.rank.dcp_rank):
            stated = f"pcp_rank={held.rank.pcp_rank} dcp_rank={held.rank.dcp_rank}"
            detail = f"planned as {stated}, but stands at pcp_rank={place[0]} dcp_rank={place[1]}"
            yield Violation("cover", "place", (held.number,), detail)
    for alike in by_key(replica.ranks, lambda held: held.own):
        if fault := _fault(alike[0]):
            yield Violation("cover", "rows", tuple(held.number for held in alike), fault)


def _fault(held: Held) -> str | None:
    """What is wrong with the rows of a rank, in words with the first wrong row, or None."""
    rows, batch = held.rank.rows, held.plan.batch
    columns = ("req", "start_pos", "stride", "num_tokens", "seq_lens", "is_prefilling")
    lens = {name: len(getattr(rows, name)) for name in columns} | {"query_start_loc": len(rows.query_start_loc) - 1}
    if len(set(lens.values())) != 1:
        return f"columns of different lengths {lens}"
    if not 0 <= rows.num_decodes <= len(rows.req):
        return f"{rows.num_decodes} decodes of {len(rows.req)} rows"
    starts = rows.query_start_loc
    if starts[0] or (starts[1:] - starts[:-1] != rows.num_tokens).any():
        return f"query_start_loc {starts[:8].tolist()} does not add up num_tokens {rows.num_tokens[:8].tolist()}"
    if not rows.num_tokens.any():
        return None if len(rows.req) == 1 else f"{len(rows.req)} rows without any token: an idle rank keeps one"
    if (
        row := first((rows.req < 0) | (rows.req >= batch.num_reqs) | (rows.num_tokens < 1) | (rows.stride < 1))
    ) is not None:
        stated = f"{rows.num_tokens[row]} tokens, stride {rows.stride[row]}, of request {rows.req[row]}"
        return f"row {row} is {stated}; there are {batch.num_reqs} requests"
    for wrong, words in _rules(held):
        if (row := first(wrong)) is not None:
            last = rows.start_pos[row] + rows.stride[row] * (rows.num_tokens[row] - 1)
            return f"row {row}, request {rows.req[row]}, positions {rows.start_pos[row]}..{last}: {words}"
    return None


def _rules(held: Held) -> Iterator[tuple[BoolArray, str]]:
    """[rows] where each rule is broken, and its words."""
    rows, batch = held.rank.rows, held.plan.batch
    req, start = rows.req, rows.start_pos
    last = start + rows.stride * (rows.num_tokens - 1)
    yield (start < batch.num_computed[req]) | (last >= batch.seq_lens[req]), "outside the request's tokens of this step"
    yield rows.seq_lens != last + 1, "seq_lens is not its last position + 1"
    in_prompt = start < batch.prompt_lens[req]
    yield rows.is_prefilling != in_prompt, "is_prefilling does not say whether it starts inside the prompt"
    behind = np.zeros(len(req), np.bool_)
    behind[1:] = (req[1:] < req[:-1]) | ((req[1:] == req[:-1]) & (start[1:] <= start[:-1]))
    yield behind, "behind a later request or position: rows go by request, then by start"
    prefill = rows.num_tokens > held.plan.budget.decode_threshold
    if held.plan.topology.pcp > 1:
        prefill |= batch.is_prefilling[req]
    wrong_side = np.zeros(len(req), np.bool_)
    wrong_side[: rows.num_decodes] = prefill[: rows.num_decodes]
    wrong_side[rows.num_decodes : rows.num_decodes + 1] = ~prefill[rows.num_decodes : rows.num_decodes + 1]
    yield wrong_side, f"on the wrong side of the decodes' end, row {rows.num_decodes}"
