"""PCP partition: which rank computes which query tokens of a step.

A prefill of q tokens is cut into pieces; pcp_size = P, one prefill of 7 tokens A..G, P = 2:

    head_tail       2P pieces of ceil(q / 2P); rank r takes r and 2P-1-r     rank 0  A B G      rank 1  C D E F
    head_tail_even  2P pieces, the first q % 2P one token longer            rank 0  A B G      rank 1  C D E F
    contiguous      rank r takes the r-th ceil(q / P) tokens                rank 0  A B C D    rank 1  E F G
    round_robin     of the step's flat prefill tokens, rank r takes every   rank 0  A C E G    rank 1  B D F
                    P-th, from the r-th on

Decodes are whole on every rank (replicated; rank 0 writes their KV), or dealt out whole in turn (sharded).
"""

from dataclasses import dataclass

import numpy as np

from cpkit.arrays import BoolArray, IntArray, ceil_div, freeze
from cpkit.errors import ConfigError

STRATEGIES = ("head_tail", "head_tail_even", "contiguous", "round_robin")

REPLICATED, SPLIT, WHOLE = 0, 1, 2
"""How a request reaches the ranks: whole on each; cut into pieces; whole on one."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What one rank computes of the queries, decodes first, then prefills, each by request and start.

    req: [n] int64; start, stride, count: [n] int64, query tokens start, start + stride, ... (count of them, counted
    from the request's first query token of this step); writes_kv: [n], this copy of the tokens writes their KV.
    """

    req: IntArray
    start: IntArray
    stride: int
    count: IntArray
    writes_kv: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The cut of a step's query tokens over pcp_size ranks; O(num_reqs), the segments are formulas.

    strategy: the name that every rank must share. mode: [num_reqs] int64, REPLICATED, SPLIT or WHOLE.
    owner: [num_reqs] int64, the rank of a WHOLE request. flat_start: [num_reqs] int64, a SPLIT request's place in the
    flat order that round_robin deals from. order: [num_reqs] int64, requests with decodes first.
    num_tokens: [pcp_size] int64, query tokens of each rank.
    """

    strategy: str
    pcp_size: int
    query_lens: IntArray
    is_prefilling: BoolArray
    mode: IntArray
    owner: IntArray
    flat_start: IntArray
    order: IntArray
    num_tokens: IntArray

    @property
    def replicated(self) -> BoolArray:
        """[num_reqs], the request is whole on every rank."""
        out: BoolArray = self.mode == REPLICATED
        return out

    @property
    def padded(self) -> int:
        """Query tokens of the fullest rank, which every rank pads to."""
        return int(self.num_tokens.max())

    def largest_share(self) -> IntArray:
        """[num_reqs] int64, the most query tokens of a request that any one rank computes."""
        share = self.query_lens.copy()
        split = np.flatnonzero(self.mode == SPLIT)
        if split.size:
            ranks = np.arange(self.pcp_size)[:, None, None]
            _, count = _pieces(self.strategy, self.query_lens[split], self.flat_start[split], ranks, self.pcp_size)
            share[split] = count.sum(-1).max(0)
        return share

    def segments(self, rank: int) -> Segments:
        """Segments of one rank."""
        here = self.order
        here = here[(self.query_lens[here] > 0) & ((self.mode[here] != WHOLE) | (self.owner[here] == rank))]
        split = self.mode[here] == SPLIT
        num_pieces = 2 if self.strategy.startswith("head_tail") else 1
        start = np.zeros((len(here), num_pieces), np.int64)
        count = np.zeros((len(here), num_pieces), np.int64)
        count[:, 0] = self.query_lens[here]
        if split.any():
            cut = here[split]
            start[split], count[split] = _pieces(
                self.strategy, self.query_lens[cut], self.flat_start[cut], np.array(rank), self.pcp_size
            )
        kept = (count > 0).ravel()
        req = np.repeat(here, num_pieces)[kept]
        return Segments(
            req=freeze(req),
            start=freeze(start.ravel()[kept]),
            stride=self.pcp_size if self.strategy == "round_robin" else 1,
            count=freeze(count.ravel()[kept]),
            writes_kv=freeze((self.mode[req] != REPLICATED) | (rank == 0)),
        )


def partition_queries(
    query_lens: IntArray,
    is_prefilling: BoolArray,
    *,
    pcp_size: int,
    dcp_size: int,
    strategy: str = "head_tail",
    shard_decodes: bool | None = None,
) -> Partition:
    """Cut a step's query tokens over the PCP ranks.

    query_lens: [num_reqs] int64; is_prefilling: [num_reqs]. shard_decodes: decodes are dealt out instead of replicated;
    by default with pcp_size > 1 and dcp_size = 1, and a ConfigError with dcp_size > 1, whose ranks merge each decode
    together. With dcp_size > 1 a prefill too short to give every rank a full set of pieces is replicated.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"partition {strategy!r}: use one of {', '.join(STRATEGIES)}")
    if shard_decodes is None:
        shard_decodes = pcp_size > 1 and dcp_size == 1
    elif shard_decodes and dcp_size > 1:
        raise ConfigError(
            f"shard_decode_requests with dcp={dcp_size}: the ranks of a DCP group hold one decode's keys together, so "
            "each computes every decode; leave the option out or use dcp=1"
        )
    mode = np.full(len(query_lens), REPLICATED, np.int64)
    owner = np.zeros(len(query_lens), np.int64)
    if shard_decodes:
        dealt = np.flatnonzero(~is_prefilling & (query_lens > 0))
        mode[dealt] = WHOLE
        owner[dealt] = np.arange(len(dealt)) % pcp_size
    split = is_prefilling & (query_lens > 0)
    if dcp_size > 1:
        split &= ~too_short(query_lens, pcp_size, strategy)
    mode[split] = SPLIT
    in_split = np.where(split, query_lens, 0)
    flat_start = np.cumsum(in_split) - in_split
    return Partition(
        strategy=strategy,
        pcp_size=pcp_size,
        query_lens=freeze(query_lens),
        is_prefilling=freeze(is_prefilling),
        mode=freeze(mode),
        owner=freeze(owner),
        flat_start=freeze(flat_start),
        order=freeze(np.argsort(is_prefilling, kind="stable")),
        num_tokens=freeze(_rank_tokens(strategy, query_lens, mode, owner, flat_start, pcp_size)),
    )


def too_short(query_lens: IntArray, pcp_size: int, strategy: str) -> BoolArray:
    """Prefills of which some rank would get an empty piece (contiguous, round_robin: nothing).

    Not monotonic: head_tail over 2 ranks finds 1 2 3 5 6 9 tokens too short, while 4, 7 and 8 are not.
    """
    q, p = query_lens, pcp_size
    if strategy == "head_tail":
        empty: BoolArray = (2 * p - 1) * ceil_div(q, 2 * p) >= q
    elif strategy == "head_tail_even":
        empty = q < 2 * p
    elif strategy == "contiguous":
        empty = (p - 1) * ceil_div(q, p) >= q
    else:
        empty = q < p
    return empty


def _pieces(
    strategy: str, query_lens: IntArray, flat_start: IntArray, rank: IntArray, pcp_size: int
) -> tuple[IntArray, IntArray]:
    """First token and token count of a rank's pieces of split prefills: [..., n, 1 or 2] int64.

    rank broadcasts against [n, pieces]: a scalar, or [P, 1, 1] for all ranks at once.
    """
    q = query_lens[:, None]
    if strategy == "round_robin":
        start = (rank - flat_start[:, None]) % pcp_size
        return start, np.maximum(ceil_div(q - start, pcp_size), 0)
    if strategy == "contiguous":
        piece, num_pieces = rank + np.zeros((1, 1), np.int64), pcp_size
    else:
        mirror = np.array([[0, 1]])
        piece, num_pieces = np.where(mirror == 0, rank, 2 * pcp_size - 1 - rank), 2 * pcp_size
    if strategy == "head_tail_even":
        base, longer = np.divmod(q, num_pieces)
        return piece * base + np.minimum(piece, longer), base + (piece < longer)
    size = ceil_div(q, num_pieces)
    start = np.minimum(piece * size, q)
    return start, np.minimum(size, q - start)


def _rank_tokens(
    strategy: str, query_lens: IntArray, mode: IntArray, owner: IntArray, flat_start: IntArray, pcp_size: int
) -> IntArray:
    """[pcp_size] int64, query tokens that each rank computes."""
    tokens = np.full(pcp_size, int(query_lens[mode == REPLICATED].sum()), np.int64)
    whole = mode == WHOLE
    np.add.at(tokens, owner[whole], query_lens[whole])
    split = np.flatnonzero(mode == SPLIT)
    if split.size:
        ranks = np.arange(pcp_size)[:, None, None]
        _, count = _pieces(strategy, query_lens[split], flat_start[split], ranks, pcp_size)
        tokens += count.sum((1, 2))
    return tokens
