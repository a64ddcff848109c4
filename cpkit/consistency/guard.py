"""The guard: before the first collective of a step, ranks show each other what they planned, beside the collectives.

    plan step 7 ─► start ─── step 6 still runs on the GPU ─── wait ─► step 7
                     └─ 136 bytes to each rank ──────────────┘└─ all alike, or DesyncError on all ranks

One exchange a step: the step's number and a digest of each field that ranks must have in common. Only where they differ
a second one sends the values of one rank of each kind, which name the field, the place and both values. Within the
step a collective is held to the plan's list before it is entered.
"""

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

from cpkit.batch import Batch
from cpkit.comm.base import Comm
from cpkit.comm.call import lines_by_rank
from cpkit.comm.patience import TIMEOUT_S
from cpkit.consistency.plans import DCP, REPLICA, WORLD, Planned, disagreements, planned_ranks
from cpkit.errors import ConfigError, DesyncError
from cpkit.promises.violation import show_ranks
from cpkit.step import StepPlan
from cpkit.views.plan_data import chunk_data, rank_place, shared_data
from cpkit.views.saved_plan import SavedPlan

FIELDS = (*WORLD, *REPLICA, *DCP)
MESSAGE = struct.Struct(f"<qq{len(FIELDS) * 8}s")
"""Step, how often steps are checked, and 8 bytes of digest a field, zeros for one that this world has not."""

END = -1
"""In the place of a step: this rank has none left."""

_MOST_CAMPS = 8
_MOST_LINES = 16


class StepGuard:
    """Compares the plans of all ranks before their steps.

    comm: of any kind; every rank makes its guard at the same place. mode: every step, sample:K (steps whose number K
    divides) or off. limit_s: how long a rank waits for the others, in seconds. holds_collectives: whether the step's
    collectives go through this comm, and so can be held to the plan's list; an engine that sends by itself says False.
    Raises ConfigError for another mode.
    """

    def __init__(
        self, comm: Comm, mode: str = "every", *, limit_s: float = TIMEOUT_S, holds_collectives: bool = True
    ) -> None:
        self.every = steps_between(mode)
        self.holds_collectives = holds_collectives
        self.limit_s = limit_s
        self._comm = comm
        self._begun: tuple[int, StepPlan] | None = None
        if self.every:
            self._channel = comm.side_channel()

    def check(self, step: int, plan: StepPlan) -> None:
        """Start and wait at once."""
        self.start(step, plan)
        self.wait()

    def start(self, step: int, plan: StepPlan) -> None:
        """Send what this rank has planned for a step, as soon as it is planned; nobody is waited for.

        Raises DesyncError if the step before has collectives left that this rank never entered.
        """
        assert self._begun is None, "each start has its wait"
        if self.every and step % self.every == 0:
            self._comm.ledger.check_done()
            self._begun = step, plan
            self._channel.start(self._message(step, plan.digests()))

    def wait(self) -> None:
        """Return once all ranks have planned the same; the last thing before the step's first collective.

        Raises DesyncError, the same on all ranks, with rank, field and values; or with the ranks that did not come.
        """
        begun, self._begun = self._begun, None
        self._comm.ledger.expect(None)
        if begun is None:
            return
        step, plan = begun
        self._meet(f"guard of step {step}", plan)
        if not self.holds_collectives:
            return
        planned = [one for listed in (*plan.collectives.layers, plan.collectives.step) for one in listed]
        self._comm.ledger.expect(planned, f"rank {self._comm.rank}, step {step}")

    def close(self) -> None:
        """The end of a run: a rank that has ended its steps while others have not is told as any other difference."""
        if self.every:
            self._comm.ledger.check_done()
            self._comm.ledger.expect(None)
            self._channel.start(self._message(END, {}))
            self._meet("guard of the end of the run", None)

    def _message(self, step: int, digests: dict[str, str]) -> bytes:
        return MESSAGE.pack(step, self.every, b"".join(bytes.fromhex(digests.get(name, "00" * 8)) for name in FIELDS))

    def _meet(self, what: str, plan: StepPlan | None) -> None:
        """Read what the others sent, and raise where it differs from what they must have in common."""
        said = self._channel.finish(self.limit_s, what)
        if said.count(said[0]) == len(said):
            return
        heads = {rank: MESSAGE.unpack(one)[:2] for rank, one in enumerate(said)}
        if len(set(heads.values())) > 1:
            told = {rank: _spell_head(*head) for rank, head in heads.items()}
            raise DesyncError("\n".join(["ranks are not at the same step", *lines_by_rank(told)]))
        ranks = self._all_ranks(said, {})
        if not disagreements(ranks, self._comm.topology):
            return  # replicas of a world work on batches of their own
        assert plan is not None, "ranks at the end send no digests"
        found = disagreements(self._all_ranks(said, self._values(said, what, plan)), self._comm.topology)
        lines = [f"  {one.field} ({one.scope}): {show_ranks(one.ranks)}: {one.detail}" for one in found]
        more = [f"  ... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        step, _ = heads[0]
        raise DesyncError("\n".join([f"ranks planned step {step} differently", *lines[:_MOST_LINES], *more]))

    def _values(self, said: Sequence[bytes], what: str, plan: StepPlan) -> dict[int, SavedPlan]:
        """The second exchange: the plan of the lowest rank of each camp, by rank; of many camps the first few."""
        leads = sorted({one: rank for rank, one in reversed(list(enumerate(said)))}.values())[:_MOST_CAMPS]
        own = _pack(plan) if self._comm.rank in leads else b""
        sent = self._channel.exchange(own, self.limit_s, what)
        return {rank: _unpack(sent[rank]) for rank in leads}

    def _all_ranks(self, said: Sequence[bytes], plans: dict[int, SavedPlan]) -> list[Planned]:
        """Every rank with the digests it sent, and the values of the first rank that sent the same, if known."""
        lead_of = {one: rank for rank, one in reversed(list(enumerate(said)))}
        values = {lead: planned_ranks("", saved)[0].values for lead, saved in plans.items()}
        unknown = Planned("", 0, self._comm.topology, {}, dict.fromkeys(FIELDS))
        return [
            replace(unknown, rank=rank, digests=_digests(one), values=values.get(lead_of[one], unknown.values))
            for rank, one in enumerate(said)
        ]


def steps_between(mode: str) -> int:
    """Every how many steps a mode checks, 0 for none.  every -> 1, sample:10 -> 10, off -> 0"""
    kind, colon, number = mode.partition(":")
    if mode in ("every", "off"):
        return int(mode == "every")
    if kind == "sample" and colon and number.isascii() and number.isdigit() and int(number) > 0:
        return int(number)
    raise ConfigError(f"guard {mode!r}: use every, sample:K (every K-th step, K from 1) or off")


def _spell_head(step: int, every: int) -> str:
    place = "the end of its steps" if step == END else f"step {step}"
    return place if every == 1 else f"{place}, with a guard every {every} steps"


def _digests(message: bytes) -> dict[str, str]:
    packed = MESSAGE.unpack(message)[2]
    return {name: packed[i * 8 : (i + 1) * 8].hex() for i, name in enumerate(FIELDS)}


def _pack(plan: StepPlan) -> bytes:
    """What `cpkit plan --save` keeps of a plan and ranks must agree on, for _unpack."""
    ranks = [{**rank_place(plan, rank), **chunk_data(rank)} for rank in plan.ranks]
    return zlib.compress(json.dumps({**shared_data(plan), "ranks": ranks}).encode(), 1)


def _unpack(data: bytes) -> SavedPlan:
    header = json.loads(zlib.decompress(data))
    return SavedPlan(header, Batch.from_json(header["batch"]), tuple(place["rank"] for place in header["ranks"]), {})
