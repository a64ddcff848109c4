"""A rank's steps against the oracle: which tokens, what is compared, and the first difference in words.

selection    exact data: the same keys. Random data: a key may differ only where its score and that of the worst
             chosen key lie within the rounding of fp32 sums
output       within a share of the largest value summed; LSE: within a distance. Both by cache format: the oracle
             reads keys as they are stored, so that the arithmetic of fp32 alone is left
hidden rows  all of them, in batch order, to the bit
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from cpkit.arrays import IntArray
from cpkit.oracle import Oracle, Token, Truth
from cpkit.worker.caches import V4, V32, row_format
from cpkit.worker.layer_step import LayerResult
from cpkit.worker.places import Places
from cpkit.worker.program import StepResult

MODES = ("all", "sample", "none")
MOST_ROW_BORDERS, MOST_SHARD_BORDERS, MOST_OTHERS = 8, 4, 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest error of an output, as a share of the largest value summed, and of an LSE."""

    out: float
    lse: float


BOUNDS = {V32.name: Bounds(out=1e-4, lse=1e-4), V4.name: Bounds(out=1e-4, lse=1e-4)}
"""By the format of the cache rows."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a rank differs from the truth, and how."""

    step: int
    layer: int
    kind: str
    rank: int
    req_id: int
    position: int
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"step {self.step}, layer {self.layer} ({self.kind}), request {self.req_id}, token {self.position}, "
            f"rank {self.rank}: {self.what} is {self.found}, the oracle has {self.expected}"
        )


@dataclass(slots=True, eq=False)
class Findings:
    """What one rank has verified: tokens times layers, keys that they selected, hidden rows; the largest errors of
    outputs (as a share of the largest value) and LSEs; how many rows differ, and the first that does.
    """

    rows: int = 0
    keys: int = 0
    hidden_rows: int = 0
    out_error: float = 0.0
    lse_error: float = 0.0
    num_mismatches: int = 0
    first: Mismatch | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Verifier:
    """Verifies the steps of one rank; mode: all or sample; seed: of the sample. Differences go into findings."""

    oracle: Oracle
    rank: int
    mode: str
    seed: int
    findings: Findings = field(default_factory=Findings)

    def check(self, step: int, result: StepResult) -> None:
        """Compare one step."""
        places = result.places
        model, topology = places.plan.model, places.plan.topology
        own = model.num_heads // topology.tp
        first = topology.coords(self.rank).tp * own
        local = np.arange(places.num_tokens) if self.mode == "all" else sample_tokens(places, self.seed + step)
        req_ids = places.plan.batch.req_ids[places.req[local]]
        tokens = [Token(*pair) for pair in zip(req_ids.tolist(), places.position[local].tolist(), strict=True)]
        for number, layer_result in enumerate(result.layers):
            truth = self.oracle.about(model, number, tokens, range(first, first + own))
            for at, row in enumerate(local.tolist()):
                self.findings.rows += 1
                fault = self._fault(places, truth, at, layer_result, row)
                self._note(step, (number, model.layers[number].kind), tokens[at], fault)
        self._check_hidden(step, result)

    def _fault(self, places: Places, truth: Truth, at: int, result: LayerResult, row: int) -> "_Fault | None":
        """What is wrong with one row, if anything; at: among the tokens of the truth."""
        chosen = torch.zeros(0, dtype=torch.int64)
        if result.selection is not None:
            picked = result.selection[row].cpu()
            chosen = picked[picked >= 0]
            self.findings.keys += len(chosen)
            if fault := selection_fault(truth, at, picked):
                return fault
        attended = truth.attend(at, chosen)
        scale, bounds = attended.largest or 1.0, BOUNDS[row_format(truth.layer).name]
        known = _known_heads(places, truth, row)
        lse_error, lse_fault = compare(
            "LSE of head", result.lse[row].cpu().double()[known], attended.lse[known], bounds.lse
        )
        out_error, out_fault = compare("output", result.out[row].cpu().double(), attended.out, bounds.out * scale)
        self.findings.lse_error = max(self.findings.lse_error, lse_error)
        self.findings.out_error = max(self.findings.out_error, out_error / scale)
        return lse_fault or out_fault

    def _check_hidden(self, step: int, result: StepResult) -> None:
        batch = result.places.plan.batch
        req_ids, positions = np.repeat(batch.req_ids, batch.query_lens), batch.positions()
        found = result.hidden.cpu()
        self.findings.hidden_rows += len(found)
        truth = self.oracle.hidden(torch.from_numpy(req_ids), torch.from_numpy(positions), found.shape[1])
        wrong = (found != truth).any(1).nonzero()[:, 0].tolist()
        if wrong:
            at = wrong[0]
            value = int((found[at] != truth[at]).nonzero()[0, 0])
            fault = _Fault(f"hidden row, value {value}", str(float(truth[at, value])), str(float(found[at, value])))
            self._note(step, (len(result.layers), "hidden rows"), Token(int(req_ids[at]), int(positions[at])), fault)

    def _note(self, step: int, layer: tuple[int, str], token: Token, fault: "_Fault | None") -> None:
        if fault is None:
            return
        self.findings.num_mismatches += 1
        if self.findings.first is None:
            where = step, *layer, self.rank, token.req_id, token.position
            self.findings.first = Mismatch(*where, fault.what, fault.expected, fault.found)


@dataclass(frozen=True, slots=True)
class _Fault:
    what: str
    expected: str
    found: str


def _known_heads(places: Places, truth: Truth, row: int) -> slice:
    """Own heads whose LSE this rank has: of a row merged under PCP + DCP the part that it merged."""
    num_heads, topology = truth.query.shape[1], places.plan.topology
    is_merged = truth.layer.compress_ratio and topology.dcp > 1 and topology.pcp > 1 and row < places.num_decode_tokens
    if not is_merged:
        return slice(0, num_heads)
    part = num_heads // topology.pcp
    return slice(part * places.rank.pcp_rank, part * (places.rank.pcp_rank + 1))


def selection_fault(truth: Truth, at: int, picked: torch.Tensor) -> _Fault | None:
    """Whether a token's selection ([k] int64, -1 behind the last) names other keys than the truth allows."""
    num_keys, index = truth.num_keys(at), truth.layer.index
    scores = None if index is None else truth.scores(at)
    wanted = torch.arange(num_keys) if index is None or scores is None else scores.best(index.topk)
    chosen = picked[picked >= 0]
    distinct = torch.unique(chosen)
    sound = len(distinct) == len(chosen) == len(wanted) and bool((chosen < num_keys).all())
    if not sound or bool((picked[len(chosen) :] >= 0).any()):
        return _Fault("selection", f"{len(wanted)} keys of {num_keys}", f"{picked.tolist()[:8]}, {len(distinct)} keys")
    expected, found = set(wanted.tolist()), set(chosen.tolist())
    missing, extra = expected - found, found - expected
    if not extra or (scores is not None and scores.allows(missing, extra, wanted)):
        return None
    return _Fault("selection", f"keys {_some(missing)}", f"keys {_some(extra)} in their place")


def compare(what: str, found: torch.Tensor, expected: torch.Tensor, bound: float) -> tuple[float, _Fault | None]:
    """Largest distance of two float64 tensors, and a fault if it exceeds the bound or NaN and infinities differ."""
    odd = (found.isfinite() != expected.isfinite()) | (~found.isfinite() & (found != expected))
    error = (found - expected).abs().nan_to_num(nan=0.0, posinf=0.0)
    worst = float(error.max()) if error.numel() else 0.0
    if not bool(odd.any()) and worst <= bound:
        return worst, None
    flat = int(odd.flatten().int().argmax()) if bool(odd.any()) else int(error.flatten().argmax())
    at = [int(i) for i in np.unravel_index(flat, tuple(found.shape))]
    fault = _Fault(
        f"{what} {at}", f"{float(expected[tuple(at)]):.7g} (within {bound:.1g})", f"{float(found[tuple(at)]):.7g}"
    )
    return worst, fault


def sample_tokens(places: Places, seed: int) -> IntArray:
    """Own tokens to verify in a long step, sorted: the first and last of rows and chunks, tokens at the borders of
    shards, and some others. The very first and last are always among them.
    """
    if not places.num_tokens:
        return np.zeros(0, np.int64)
    rng = np.random.default_rng(seed)
    topology, rows = places.plan.topology, places.rank.rows
    start, stop = rows.query_start_loc[:-1], rows.query_start_loc[1:]
    borders = np.concatenate([start[stop > start], stop[stop > start] - 1, _chunk_borders(places)])
    turn = topology.interleave * topology.dcp
    shard_borders = np.flatnonzero(np.isin(places.position % turn, (0, turn - 1)))
    picked = [
        np.array([0, places.num_tokens - 1]),
        _some_of(rng, np.unique(borders), MOST_ROW_BORDERS),
        _some_of(rng, shard_borders, MOST_SHARD_BORDERS),
        _some_of(rng, np.arange(places.num_tokens), MOST_OTHERS),
    ]
    return np.unique(np.concatenate(picked))


def _chunk_borders(places: Places) -> IntArray:
    """First and last own token of each run of query tokens of a chunk."""
    loc, first_row = places.rank.rows.query_start_loc, places.rank.rows.num_decodes
    borders = []
    for chunks in places.rank.chunks.values():
        for chunk in chunks:
            first, last = int(loc[first_row + chunk.row_start]), int(loc[first_row + chunk.row_stop])
            starts = np.arange(first, last, chunk.run)
            borders += [starts, np.minimum(starts + chunk.run, last) - 1]
    return np.concatenate([np.zeros(0, np.int64), *borders])


def _some_of(rng: np.random.Generator, tokens: IntArray, most: int) -> IntArray:
    return tokens if len(tokens) <= most else rng.choice(tokens, most, replace=False)


def _some(keys: Iterable[int], most: int = 6) -> str:
    shown = sorted(int(key) for key in keys)
    return f"{shown[:most]}" if len(shown) <= most else f"{shown[:most]} and {len(shown) - most} more"
