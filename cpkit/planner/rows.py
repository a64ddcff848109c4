"""A rank's rows: each a run of one request's query tokens, with the context it sees.

Request 0 decodes (9 computed), request 1 prefills tokens 2..8 of 9, P = 2, head_tail, rank 0:

    row              0        1        2
    req              0        1        1
    tokens           9        2 3      8         positions
    query_start_loc  0        1        3     4
    seq_lens        10        4        9         last position + 1
    logits_idx       0        2        3         last token of each row
"""

from dataclasses import dataclass

import numpy as np

from cpkit.arrays import BoolArray, IntArray, freeze, prefix_sum, seal, spread
from cpkit.batch import Batch
from cpkit.planner.order import leading_decodes
from cpkit.planner.partition import Segments


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rank-local batch, decodes first. A rank without tokens keeps one empty row of request 0.

    req, start_pos, stride, num_tokens, seq_lens: [rows] int64; stride: positions from one token of a row to the next;
    is_prefilling: [rows].
    query_start_loc: [rows + 1] int64; num_decodes: leading rows planned as decodes, the others as prefills.
    """

    req: IntArray
    start_pos: IntArray
    stride: IntArray
    num_tokens: IntArray
    seq_lens: IntArray
    is_prefilling: BoolArray
    query_start_loc: IntArray
    num_decodes: int

    @property
    def num_decode_tokens(self) -> int:
        """Query tokens of the decode rows, which come first."""
        return int(self.query_start_loc[self.num_decodes])

    @property
    def total_tokens(self) -> int:
        """Query tokens of the rank."""
        return int(self.query_start_loc[-1])

    @property
    def logits_idx(self) -> IntArray:
        """[rows] int64, local token whose hidden row samples for the row; -1 for an empty row."""
        return np.where(self.num_tokens > 0, self.query_start_loc[1:] - 1, -1)

    def positions(self) -> IntArray:
        """[total_tokens] int64, position of each local token in its request."""
        first, stride = np.repeat(self.start_pos, self.num_tokens), np.repeat(self.stride, self.num_tokens)
        return first + stride * spread(self.num_tokens)

    def reqs(self) -> IntArray:
        """[total_tokens] int64, request of each local token."""
        return np.repeat(self.req, self.num_tokens)


def rank_rows(batch: Batch, segments: Segments, decode_threshold: int, *, split_extends: bool) -> Rows:
    """Rows of one rank from its segments.

    decode_threshold: longest row that is still a decode. split_extends: a row of a request that was inside its prompt
    before this step is a prefill however short and wherever it starts (as under PCP, where a rank may get one token of
    a long prompt, or a piece past its end), so that all ranks agree; else short ones are decodes.
    """
    if not len(segments.req):
        return _placeholder(batch)
    req, count = segments.req, segments.count
    start_pos = batch.num_computed[req] + segments.start
    num_decodes = leading_decodes(
        count,
        batch.is_prefilling[req],
        threshold=decode_threshold,
        treat_short_extends_as_decodes=not split_extends,
    )
    return Rows(
        req=req,
        start_pos=seal(start_pos),
        stride=segments.stride,
        num_tokens=count,
        seq_lens=seal(start_pos + segments.stride * (count - 1) + 1),
        is_prefilling=seal(start_pos < batch.prompt_lens[req]),
        query_start_loc=seal(prefix_sum(count)),
        num_decodes=num_decodes,
    )


def _placeholder(batch: Batch) -> Rows:
    """The one empty row that keeps an idle rank's collectives in shape."""
    zero = freeze(np.zeros(1, np.int64))
    start = freeze(batch.num_computed[:1] if batch.num_reqs else np.zeros(1, np.int64))
    return Rows(
        req=zero,
        start_pos=start,
        stride=seal(np.ones(1, np.int64)),
        num_tokens=zero,
        seq_lens=zero,
        is_prefilling=freeze(start < batch.prompt_lens[:1] if batch.num_reqs else np.zeros(1, np.bool_)),
        query_start_loc=freeze(np.zeros(2, np.int64)),
        num_decodes=0,
    )
