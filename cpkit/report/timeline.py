"""A replay on the cost model's clock as a Chrome trace, which Perfetto opens.

process   track           events
engine    steps           one slice a step; counters: KV blocks held, requests running and waiting
rank R    computation     the stages of each kind of layer, all its layers in one slice (timeline_layout)
          communication   the collectives; a flow runs through the ranks of each group

Events are written as the steps come, in the order of time on each track; nothing but counts is kept. Times are whole
nanoseconds, written as the format's microseconds.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import cpkit
from cpkit.errors import ConfigError
from cpkit.report.table import every
from cpkit.report.timeline_layout import FoldedLayers, Placed, fold_layers
from cpkit.settings import StepSettings
from cpkit.sizing.cost.clock import PlannedClock
from cpkit.sizing.cost.step import CollectiveCost, StageCost
from cpkit.topology import Topology
from cpkit.workload.scheduler import ScheduledStep

MAX_RANKS = 16
"""Ranks drawn where none are named."""

STEPS, COMPUTE, COMMUNICATION = 0, 1, 2
"""Tracks of a process, counted from above all process numbers: a viewer puts a track that has its process's first."""


def default_ranks(topology: Topology) -> list[int]:
    """All ranks of a small replica, else one of each PCP place, at most MAX_RANKS of them, evenly spread."""
    if topology.replica_size <= MAX_RANKS:
        return list(range(topology.replica_size))
    places = range(topology.pcp)
    if topology.pcp > MAX_RANKS:
        places = range(0, topology.pcp, -(-topology.pcp // MAX_RANKS))
    if topology.pcp == 1:
        return list(range(MAX_RANKS))
    return [topology.tp * place for place in places]


class Timeline:
    """Write the first max_steps steps of a replay to a file, for some ranks of the replica; use it in a `with`, which
    opens the file and ends it, after an interrupt too.

    clock: of the replay. Ranks of one PCP place do the same work, and each is drawn as the clock costs its place.
    Raises ConfigError for a rank that is not in the replica.
    """

    def __init__(
        self, path: str, clock: PlannedClock, settings: StepSettings, ranks: Sequence[int], max_steps: int
    ) -> None:
        topology = settings.topology
        for rank in ranks:
            if not 0 <= rank < topology.replica_size:
                raise ConfigError(f"no rank {rank} to draw: the replica's are 0 to {topology.replica_size - 1}")
        if not ranks or len(set(ranks)) < len(ranks) or max_steps < 1:
            raise ConfigError("a timeline has at least one step, and at least one rank, each once")
        self.path, self.ranks, self.num_steps = path, tuple(ranks), 0
        self._file: TextIO | None = None
        self._clock, self._settings, self._max_steps = clock, settings, max_steps
        self._pcp = {rank: topology.coords(rank).pcp for rank in ranks}
        self._engine = topology.replica_size  # the process number behind the ranks'
        self._first_track = self._engine + 1
        self._shown_groups = {name: self._groups(name) for name in ("pcp", "dcp", "tp")}
        self._num_events = self._num_flows = 0
        self._last: defaultdict[tuple[int, int], int] = defaultdict(int)

    def _groups(self, name: str) -> list[list[int]]:
        """Groups with at least two of the ranks drawn, those alone."""
        shown = [[rank for rank in group if rank in self._pcp] for group in self._settings.topology.groups(name)]
        return [group for group in shown if len(group) > 1]

    def __enter__(self) -> "Timeline":
        return self

    def _begin(self) -> None:
        """Open the file, name processes and tracks; not before the first step, until which settings may be refused."""
        self._file = Path(self.path).open("w", encoding="utf-8")  # noqa: SIM115  # closed by __exit__
        # no displayTimeUnit: its default is the same, and older Perfettos take it for the unit of the times
        self._file.write('{"traceEvents": [')
        self._name_process(self._engine, "engine", -1, {STEPS: "steps"})
        for rank in self.ranks:
            label = f"rank {rank} (pcp {self._pcp[rank]}, dcp {self._settings.topology.dcp_rank(rank)})"
            self._name_process(rank, label, rank, {COMPUTE: "computation", COMMUNICATION: "communication"})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None and error is None:
            self._begin()  # a replay without steps
        if self._file is None:
            return
        model = self._clock.model
        about = {
            "written by": f"cpkit {cpkit.__version__}",
            "model": self._settings.model.name,
            "chip": model.chip.label,
            "layers of": model.engine or "the kernels alone",
            "times": "estimates of the cost model; layers of a kind are folded into one",
            "assumptions": json.dumps({name: value for name, value, _ in model.assumptions.rows()}),
        }
        self._file.write(f'\n], "otherData": {json.dumps(about)}}}\n')
        self._file.close()

    def add(self, step: ScheduledStep) -> None:
        """Write one more step, if it is not beyond the last wanted."""
        if self.num_steps == self._max_steps:
            return
        if self._file is None:
            self._begin()
        self.num_steps += 1
        cost = self._clock.model.step_cost(self._settings.plan(step.batch, self._clock.ranks))
        self._step(step)
        begin = step.time_s
        for layer in (*cost.layers, cost.once):
            folded = fold_layers(layer)
            for rank in self.ranks:
                for placed in folded.stages:
                    self._stage(rank, folded, placed, begin)
            for placed in folded.collectives:
                self._collective(folded, placed, begin)
            begin += folded.seconds

    def _step(self, step: ScheduledStep) -> None:
        """The engine's part: a slice, and the counters at its beginning."""
        start, stop = nanoseconds(step.time_s), nanoseconds(step.time_s + step.duration_s)
        batch = step.batch
        args = {"requests": batch.num_reqs, "decodes": batch.num_decodes, "query tokens": batch.num_tokens}
        if span := self._slice(self._engine, STEPS, f"step {step.index}", start, stop, args):
            at = micros(span[0])
            common = {"ph": "C", "pid": self._engine, "tid": self._first_track + STEPS, "ts": at}
            self._write({**common, "name": "KV blocks", "args": {"held": step.num_held_blocks}})
            requests = {"running": batch.num_reqs, "waiting": step.num_waiting}
            self._write({**common, "name": "requests", "args": requests})

    def _stage(self, rank: int, folded: FoldedLayers, placed: Placed, begin: float) -> None:
        """One rank's share of a stage."""
        stage = placed.cost
        assert isinstance(stage, StageCost)
        seconds, num_layers = stage.seconds[self._pcp[rank]], folded.layer.num_layers
        start = begin + placed.start
        args = {
            "layers": f"{num_layers} x {folded.layer.kind}",
            "us a layer": round(1e6 * seconds, 3),
            "drawn": round(folded.shrink, 4),
            "source": stage.source.words,
        }
        stop = nanoseconds(start + num_layers * folded.shrink * seconds)
        self._slice(rank, COMPUTE, stage.name, nanoseconds(start), stop, args)

    def _collective(self, folded: FoldedLayers, placed: Placed, begin: float) -> None:
        """A collective on every rank drawn, and a flow through those of each group."""
        cost = placed.cost
        assert isinstance(cost, CollectiveCost)
        one = cost.collective
        args = {
            "layers": f"{folded.layer.num_layers} x {folded.layer.kind}",
            "operation": f"{one.op} over {one.group}",
            "bytes a layer": one.bytes,
            "us a layer": round(1e6 * cost.seconds, 3),
            "source": cost.source.words,
        }
        start, stop = nanoseconds(begin + placed.start), nanoseconds(begin + placed.stop)
        flows: dict[int, tuple[str, int]] = {}
        for group in self._shown_groups[one.group]:
            self._num_flows += 1
            phases = ["s", *["t"] * (len(group) - 2), "f"]
            flows |= {rank: (phase, self._num_flows) for rank, phase in zip(group, phases, strict=True)}
        for rank in self.ranks:
            span = self._slice(rank, COMMUNICATION, one.what, start, stop, args)
            if span and rank in flows:
                phase, number = flows[rank]
                at = span[0] if phase == "s" else (span[0] + span[1]) // 2
                flow = {"ph": phase, "id": number, "name": one.what, "cat": "collective", "bp": "e"}
                self._write({**flow, "pid": rank, "tid": self._first_track + COMMUNICATION, "ts": micros(at)})

    def _slice(
        self, process: int, track: int, name: str, start: int, stop: int, args: dict[str, Any]
    ) -> tuple[int, int] | None:
        """A slice in nanoseconds, moved behind the one before it where rounding made them meet; None: it is empty."""
        start = max(start, self._last[process, track])
        if stop <= start:
            return None
        self._last[process, track] = stop
        event = {
            "ph": "X",
            "name": name,
            "pid": process,
            "tid": self._first_track + track,
            "ts": micros(start),
            "dur": micros(stop - start),
        }
        self._write({**event, "args": args})
        return start, stop

    def _name_process(self, process: int, name: str, place: int, tracks: dict[int, str]) -> None:
        about: list[tuple[int, str, dict[str, Any]]] = [
            (min(tracks), "process_name", {"name": name}),
            (min(tracks), "process_sort_index", {"sort_index": place}),
        ]
        for track, text in tracks.items():
            about += [(track, "thread_name", {"name": text}), (track, "thread_sort_index", {"sort_index": track})]
        for track, what, args in about:
            event = {"ph": "M", "name": what, "pid": process, "tid": self._first_track + track}
            self._write({**event, "args": args})

    def _write(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write((",\n" if self._num_events else "\n") + json.dumps(event, separators=(",", ":")))
        self._num_events += 1


def nanoseconds(seconds: float) -> int:
    """The clock of a trace, which never rounds two ways."""
    return round(1e9 * seconds)


def micros(ns: int) -> float:
    """The format's unit, exact to the nanosecond."""
    return ns / 1000


def timeline_text(timeline: Timeline, settings: StepSettings, num_steps: int) -> str:
    """What was written, for the report; num_steps: of the replay."""
    drawn, of = len(timeline.ranks), settings.topology.replica_size
    ranks = every(of, "rank") if drawn == of else f"ranks {', '.join(map(str, timeline.ranks))} of {of}"
    more = "; --timeline-ranks draws others" if drawn < of else ""
    steps = f"the first {timeline.num_steps:,} of {num_steps:,} steps (--timeline-steps)"
    if timeline.num_steps == num_steps:
        steps = every(num_steps, "step")
    return f"Timeline  {timeline.path}: {steps}, {ranks}{more}; open it in Perfetto"
