"""The world of ranks: who shares queries, who shares keys, in which order.

World layout, slowest to fastest: data parallel, pipeline, PCP, TP.  tp=2, pcp=2, dcp=4:

    rank              0  1  2  3
    (pcp, tp)        00 01 10 11
    pcp groups       {0, 2} {1, 3}       ranks that split the query tokens of a prefill
    dcp group        0, 2, 1, 3          ranks that split the stored keys, in this order
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from cpkit.errors import ConfigError

MAX_WORLD = 1 << 16
GROUPS = ("world", "dp", "pp", "pcp", "tp", "dcp")


class Coords(NamedTuple):
    """Where a rank sits on each axis of the world."""

    dp: int
    pp: int
    pcp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's place in its PCP and DCP groups, and how keys are dealt to the latter. Any sizes; raises ConfigError.

    interleave: tokens that a DCP rank keeps a turn, or keys, where what takes the shard counts keys.
    """

    pcp_size: int = 1
    pcp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        for group, size, rank in (("pcp", self.pcp_size, self.pcp_rank), ("dcp", self.dcp_size, self.dcp_rank)):
            if not 0 <= rank < size:
                raise ConfigError(f"{group}_rank={rank} with {group}_size={size}: a rank is one of 0..size - 1")
        if self.interleave < 1:
            raise ConfigError(f"interleave={self.interleave}: a rank keeps at least one token a turn")


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel axes and of the sharded KV cache.

    dp, pp, pcp, tp: data, pipeline, prefill-context and tensor parallel sizes; the world is their product.
    dcp: decode-context parallel size; adds no ranks. With pcp = 1 a divisor of tp; else 1, pcp or tp * pcp.
    interleave: consecutive tokens kept on one DCP rank before the next rank's turn; divides block_size.
    block_size: tokens a KV block holds on one rank.
    Raises ConfigError with the legal choices.
    """

    dp: int = 1
    pp: int = 1
    pcp: int = 1
    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    block_size: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 1 << 20:
                raise ConfigError(f"{field.name}={size!r}: every size is a whole number from 1 to 2^20")
        if self.world_size > MAX_WORLD:
            raise ConfigError(
                f"dp={self.dp} pp={self.pp} pcp={self.pcp} tp={self.tp} is a world of {self.world_size} ranks: worlds "
                f"have at most {MAX_WORLD}"
            )
        legal = legal_dcp_sizes(self.tp, self.pcp)
        if self.dcp not in legal:
            rule = "a divisor of tp" if self.pcp == 1 else "1, pcp or tp * pcp"
            raise ConfigError(f"dcp={self.dcp} with tp={self.tp} pcp={self.pcp}: dcp must be {rule}, one of {legal}")
        if self.block_size % self.interleave:
            legal = [i for i in range(1, self.block_size + 1) if self.block_size % i == 0]
            raise ConfigError(
                f"interleave={self.interleave} does not divide block_size={self.block_size}: a block would start "
                f"inside another rank's turn; use one of {legal}"
            )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.pp * self.replica_size

    @property
    def replica_size(self) -> int:
        """Ranks that work on one batch together: pcp * tp."""
        return self.pcp * self.tp

    @property
    def virtual_block(self) -> int:
        """Tokens that one block id spans over a DCP group."""
        return self.block_size * self.dcp

    def coords(self, rank: int) -> Coords:
        """Place of a rank; undoes rank_of."""
        self._check_rank(rank)
        rest, tp = divmod(rank, self.tp)
        rest, pcp = divmod(rest, self.pcp)
        dp, pp = divmod(rest, self.pp)
        return Coords(dp, pp, pcp, tp)

    def rank_of(self, coords: Coords) -> int:
        """Rank at a place."""
        for axis, at in zip(Coords._fields, coords, strict=True):
            if not 0 <= at < getattr(self, axis):
                raise ConfigError(f"{axis} rank {at} is not in 0..{getattr(self, axis) - 1}")
        dp, pp, pcp, tp = coords
        return ((dp * self.pp + pp) * self.pcp + pcp) * self.tp + tp

    def dcp_rank(self, rank: int) -> int:
        """Place of a rank in its DCP group: the (pcp, tp) block is laid out tp-major and cut in runs of dcp."""
        coords = self.coords(rank)
        return (coords.tp * self.pcp + coords.pcp) % self.dcp

    def shard_of(self, rank: int) -> Shard:
        """The place of a rank in its groups, interleave in tokens."""
        return Shard(
            pcp_size=self.pcp,
            pcp_rank=self.coords(rank).pcp,
            dcp_size=self.dcp,
            dcp_rank=self.dcp_rank(rank),
            interleave=self.interleave,
        )

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups of one kind, each in group-rank order; `name` is one of GROUPS."""
        if name not in GROUPS:
            raise ConfigError(f"no group {name!r}: the groups are {', '.join(GROUPS)}")
        return self._groups[name]

    def group_of(self, name: str, rank: int) -> tuple[int, ...]:
        """The group of one kind that a rank belongs to."""
        self._check_rank(rank)
        return next(group for group in self.groups(name) if rank in group)

    @cached_property
    def _groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {name: tuple(self._make_groups(name)) for name in GROUPS}

    def _make_groups(self, name: str) -> list[tuple[int, ...]]:
        ranks = range(self.world_size)
        if name == "world":
            return [tuple(ranks)]
        if name == "dcp":
            ordered = [
                block + pcp * self.tp + tp
                for block in range(0, self.world_size, self.replica_size)
                for tp in range(self.tp)
                for pcp in range(self.pcp)
            ]
            return [tuple(ordered[i : i + self.dcp]) for i in range(0, len(ordered), self.dcp)]
        members: dict[Coords, list[int]] = {}
        for rank in ranks:
            members.setdefault(self.coords(rank)._replace(**{name: 0}), []).append(rank)
        return [tuple(group) for group in members.values()]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not in this world of {self.world_size} ranks (0..{self.world_size - 1})")


def legal_dcp_sizes(tp: int, pcp: int) -> list[int]:
    """DCP sizes allowed for this tp and pcp."""
    if pcp == 1:
        return [size for size in range(1, tp + 1) if tp % size == 0]
    return sorted({1, pcp, tp * pcp})


def gathered_heads(own: int, *, tp: int, pcp: int, dcp: int) -> int:
    """Heads that a rank attends its shard of keys with: those of all TP ranks of its DCP group, each with `own`.

    tp = 2, 8 heads a TP rank      pcp = 1, dcp = 2: both TP ranks, 16      pcp = 4, dcp = 4: its own, 8
                                   dcp = 1: its own, 8                      pcp = 4, dcp = 8: both TP ranks, 16
    """
    if dcp == 1 or (pcp > 1 and dcp == pcp):
        return own
    return own * (dcp if pcp == 1 else tp)
