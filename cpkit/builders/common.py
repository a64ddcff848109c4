"""What a builder takes: one rank's batch of a step, its lengths on the device and on the host.

Three rows, decodes first; the tokens of a row are neighbours in the flat batch:

    row                  0 (decode)   1 (decode)   2 (prefill)     padding
    query_start_loc      0            1            2               6
    token                0            1            2  3  4  5      6  7        num_tokens = 8
    seq_lens             9            4            6
    position             8            3            2  3  4  5
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from cpkit.arrays import BoolArray, IntArray, as_ints, as_lens, freeze, prefix_sum
from cpkit.batch import pad_block_tables
from cpkit.errors import PlanError
from cpkit.kernels.checks import check_tensor
from cpkit.kernels.token_to_req import BatchRows
from cpkit.planner.slots import as_int32

GatherSlots = Callable[[torch.Tensor], torch.Tensor]
"""The one collective that a builder enters: [padded] int64 of each PCP rank -> [pcp_size * padded], rank after rank."""


@dataclass(frozen=True, slots=True, eq=False)
class GatheredSlots:
    """Slots of all PCP ranks' tokens, whose KV every rank has and of which it writes what it stores. P=2, ABG and CDEF:

        token           A  B  G  -     C  D  E  F      each rank's tokens, padded to the fullest
        slot_mapping    0  1  6 -1     2  3  4  5      -1 too: another DCP rank's key, a second copy

    slot_mapping: [pcp_size * padded] int64 on the device.
    writes_kv: [padded] bool on the device, this rank's copy of the token writes its KV; needed for compressed keys
        under PCP + DCP, where a token's own slot is -1 on all ranks but its owner.
    """

    slot_mapping: torch.Tensor
    writes_kv: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WholeRequests:
    """Of each row's whole request what the rows of one PCP rank do not show; all [num_rows] int64 on the host.

    req: request of each row. max_shard_lens: tokens of its largest DCP shard. largest_shares: the most query tokens
    that any PCP rank has of it.
    """

    req: IntArray
    max_shard_lens: IntArray
    largest_shares: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class RankBatch:
    """One rank's rows of a step, decodes first. Raises PlanError where its parts contradict each other.

    On the device: query_start_loc [num_rows + 1], seq_lens [num_rows], block_tables [num_rows, width] int32;
        slot_mapping [>= num_tokens] int64, of this rank's own tokens.
    On the host: host_query_start_loc [num_rows + 1] and max_seq_lens [num_rows] int64, never below the device's values
        (which speculation may make smaller than the host knows): they size buffers and chunks, and decide nothing else.
    num_tokens: tokens of the step, padding included. is_prefilling: [num_rows], inside the prompt before this step.
    causal: False for a draft block, whose tokens see each other.
    positions: [num_tokens] int64 on the device, where a builder reads them (kpool).
    row_stride: [num_rows] int32 on the device, positions from one token of a row to the next; None: 1.
    gathered: under PCP, where the cache is an indexer's. requests: under PCP + DCP there, None for a dummy batch, whose
        rows are requests of their own.
    replay_start: [num_rows] int32 on the device, first position the window cache still has, or None.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    host_query_start_loc: IntArray
    max_seq_lens: IntArray
    num_tokens: int
    is_prefilling: BoolArray | None = None
    causal: bool = True
    positions: torch.Tensor | None = None
    row_stride: torch.Tensor | None = None
    gathered: GatheredSlots | None = None
    requests: WholeRequests | None = None
    replay_start: torch.Tensor | None = None

    def __post_init__(self) -> None:
        device = self.query_start_loc.device
        check_tensor("query_start_loc", self.query_start_loc, torch.int32, (self.num_rows + 1,), device)
        check_tensor("seq_lens", self.seq_lens, torch.int32, (self.num_rows,), device)
        check_tensor("block_tables", self.block_tables, torch.int32, (self.num_rows, None), device)
        check_tensor("slot_mapping", self.slot_mapping, torch.int64, (None,), device)
        if self.positions is not None:
            check_tensor("positions", self.positions, torch.int64, (None,), device)
        for name in ("row_stride", "replay_start"):
            if getattr(self, name) is not None:
                check_tensor(name, getattr(self, name), torch.int32, (self.num_rows,), device)
        if self.gathered is not None:
            check_tensor("gathered slot_mapping", self.gathered.slot_mapping, torch.int64, (None,), device)
            if self.gathered.writes_kv is not None:
                check_tensor("writes_kv", self.gathered.writes_kv, torch.bool, (None,), device)
        self._check_host()

    @property
    def num_rows(self) -> int:
        """Rows, those without tokens included."""
        return len(self.max_seq_lens)

    @property
    def rows(self) -> BatchRows:
        """The rows as kernels take them."""
        return BatchRows(self.query_start_loc, self.seq_lens, self.row_stride)

    @property
    def query_lens(self) -> IntArray:
        """[num_rows] int64, query tokens of each row as the host knows them."""
        return np.diff(self.host_query_start_loc)

    @property
    def num_real_tokens(self) -> int:
        """Tokens without the padding."""
        return int(self.host_query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        """Query tokens of the longest row."""
        return int(self.query_lens.max(initial=0))

    def _check_host(self) -> None:
        loc = self.host_query_start_loc
        if len(loc) != self.num_rows + 1 or loc[0] != 0 or (np.diff(loc) < 0).any():
            raise PlanError(
                f"host_query_start_loc {loc.tolist()} of {self.num_rows} rows: it starts at 0, never falls, and has "
                "one entry more than there are rows"
            )
        if self.num_tokens < self.num_real_tokens or len(self.slot_mapping) < self.num_tokens:
            raise PlanError(
                f"num_tokens={self.num_tokens} with {self.num_real_tokens} query tokens and {len(self.slot_mapping)} "
                "slots: padding adds tokens, and every token has a slot (-1: nothing is written)"
            )
        # a padding row has no context, whatever its query length
        short = (self.max_seq_lens < self.query_lens) & (self.max_seq_lens != 0)
        if short.any() or (self.max_seq_lens < 0).any():
            row = int(np.flatnonzero(short | (self.max_seq_lens < 0))[0])
            raise PlanError(
                f"row {row}: seq_len {int(self.max_seq_lens[row])} with {int(self.query_lens[row])} query tokens: the "
                "length includes this step's query tokens"
            )
        if self.num_tokens and not self.num_rows:
            raise PlanError(f"num_tokens={self.num_tokens} and no rows: every token, padding included, has a row")
        if self.positions is not None and len(self.positions) < self.num_real_tokens:
            raise PlanError(f"{len(self.positions)} positions for {self.num_real_tokens} query tokens: one a token")
        by_row = {} if self.is_prefilling is None else {"is_prefilling": self.is_prefilling}
        if self.requests is not None:
            by_row |= {field.name: getattr(self.requests, field.name) for field in fields(self.requests)}
        for name, values in by_row.items():
            if len(values) != self.num_rows:
                raise PlanError(f"{name} has {len(values)} entries for {self.num_rows} rows: one a row")


def rank_batch(
    query_lens: npt.ArrayLike,
    seq_lens: npt.ArrayLike,
    block_tables: npt.ArrayLike,
    slot_mapping: npt.ArrayLike,
    *,
    num_tokens: int | None = None,
    is_prefilling: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
    causal: bool = True,
    device: torch.device | str = "cpu",
) -> RankBatch:
    """A batch from host values, its lengths known exactly.

    num_tokens: tokens with padding (default: one a slot). Lengths and block ids beyond int32, which the device holds,
    raise PlanError. What PCP adds is added with dataclasses.replace.
    """
    loc = prefix_sum(as_lens("query_lens", query_lens, PlanError))
    places = None if positions is None else as_ints("positions", positions, PlanError)
    lens = as_lens("seq_lens", seq_lens, PlanError)
    slots = as_ints("slot_mapping", slot_mapping, PlanError)
    return RankBatch(
        query_start_loc=torch.tensor(as_int32("query_start_loc", loc), device=device),
        seq_lens=torch.tensor(as_int32("seq_lens", lens), device=device),
        block_tables=torch.tensor(pad_block_tables(block_tables), device=device),
        slot_mapping=torch.tensor(slots, device=device),
        host_query_start_loc=freeze(loc),
        max_seq_lens=freeze(lens),
        num_tokens=len(slots) if num_tokens is None else num_tokens,
        is_prefilling=None if is_prefilling is None else np.asarray(is_prefilling, np.bool_),
        causal=causal,
        positions=None if places is None else torch.tensor(places, device=device),
    )
