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

from cpkit.arrays import BoolArray, IntArray, ceil_div, freeze, seal
from cpkit.errors import ConfigError

STRATEGIES = ("head_tail", "head_tail_even", "contiguous", "round_robin")

REPLICATED, SPLIT, WHOLE = 0, 1, 2
"""How a request reaches the ranks: whole on each; cut into pieces; whole on one."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What one rank computes of the queries, decodes first, then prefills, each by request and start.

    req: [n] int64; start, stride, count: [n] int64, query tokens start, start + stride, ... (count of them, counted
    from the request's first query token of this step; whole requests have stride 1 under every strategy);
    writes_kv: [n], this copy of the tokens writes their KV.
    """

    req: IntArray
    start: IntArray
    stride: IntArray
    count: IntArray
    writes_kv: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The cut of a step's query tokens over pcp_size ranks; what it costs grows with requests and ranks, not tokens.

    strategy: the name that every rank must share. query_lens: [num_reqs] int64, of the step.
    mode: [num_reqs] int64, REPLICATED, SPLIT or WHOLE. order: [num_reqs] int64, requests with decodes first.
    dealt: [dealt] int64, places in order of the WHOLE requests; the j-th is rank j % pcp_size's.
    split: [splits] int64, places in order of the SPLIT requests; piece_start, piece_count: [pcp_size, splits, 1 or 2]
    int64, first token and tokens of each rank's pieces of them.
    num_tokens: [pcp_size] int64, query tokens of each rank.
    """

    strategy: str
    pcp_size: int
    query_lens: IntArray
    mode: IntArray
    order: IntArray
    dealt: IntArray
    split: IntArray
    piece_start: IntArray
    piece_count: IntArray
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

    def num_known(self, is_prefilling: BoolArray) -> int:
        """Query tokens that all ranks compute first and alike, replicated decodes: their KV need not travel.

        is_prefilling: [num_reqs]. With one rank nothing travels, and none count.
        """
        if self.pcp_size == 1 or len(self.dealt):
            return 0
        return int(self.query_lens[~is_prefilling].sum())

    def largest_share(self) -> IntArray:
        """[num_reqs] int64, the most query tokens of a request that any one rank computes."""
        share = self.query_lens.copy()
        share[self.order[self.split]] = self.piece_count.sum(-1).max(0)
        return share

    def segments(self, rank: int) -> Segments:
        """Segments of one rank."""
        pieces = self.piece_count.shape[-1]
        start, count = np.zeros((2, len(self.order), pieces), np.int64)  # of what may be the rank's, in order
        count[:, 0] = self.query_lens[self.order]
        if len(self.dealt):
            count[self.dealt, 0] *= np.arange(len(self.dealt)) % self.pcp_size == rank
        start[self.split], count[self.split] = self.piece_start[rank], self.piece_count[rank]
        kept = count.ravel().nonzero()[0]
        req = self.order[kept // pieces]
        mode = self.mode[req]
        by_turns = self.strategy == "round_robin"
        return Segments(
            req=seal(req),
            start=seal(start.ravel()[kept]),
            stride=seal(np.where(mode == SPLIT, self.pcp_size, 1) if by_turns else np.ones(len(req), np.int64)),
            count=seal(count.ravel()[kept]),
            writes_kv=seal((mode != REPLICATED) | (rank == 0)),
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
    order = is_prefilling.argsort(kind="stable")
    lens = query_lens[order]
    filled = lens.nonzero()[0]
    num_decodes = int(filled.searchsorted(len(lens) - np.count_nonzero(is_prefilling)))
    dealt = filled[: num_decodes if shard_decodes else 0]
    split = filled[num_decodes:]
    if dcp_size > 1:
        split = split[~too_short(lens[split], pcp_size, strategy)]
    mode = np.full(len(lens), REPLICATED, np.int64)
    mode[order[dealt]], mode[order[split]] = WHOLE, SPLIT
    piece_start, piece_count = _pieces(strategy, lens[split], pcp_size)
    num_tokens = piece_count.sum((1, 2)) + int(query_lens[mode == REPLICATED].sum())
    if shard_decodes:
        np.add.at(num_tokens, np.arange(len(dealt)) % pcp_size, lens[dealt])
    return Partition(
        strategy=strategy,
        pcp_size=pcp_size,
        query_lens=freeze(query_lens),
        mode=seal(mode),
        order=seal(order),
        dealt=seal(dealt),
        split=seal(split),
        piece_start=seal(piece_start),
        piece_count=seal(piece_count),
        num_tokens=seal(num_tokens),
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


def _pieces(strategy: str, query_lens: IntArray, pcp_size: int) -> tuple[IntArray, IntArray]:
    """First token and token count of every rank's pieces of split prefills: [pcp_size, n, 1 or 2] int64."""
    q = query_lens[:, None]
    rank = np.arange(pcp_size)[:, None, None]
    if strategy == "round_robin":
        flat_start = (np.cumsum(query_lens) - query_lens)[:, None]
        start = (rank - flat_start) % pcp_size
        return start, np.maximum(ceil_div(q - start, pcp_size), 0)
    if strategy == "contiguous":
        piece, num_pieces = rank, pcp_size
    else:
        piece, num_pieces = np.concatenate([rank, 2 * pcp_size - 1 - rank], axis=2), 2 * pcp_size
    if strategy == "head_tail_even":
        base, longer = np.divmod(q, num_pieces)
        return piece * base + np.minimum(piece, longer), base + (piece < longer)
    size = ceil_div(q, num_pieces)
    start = np.minimum(piece * size, q)
    return start, np.minimum(size, q - start)
