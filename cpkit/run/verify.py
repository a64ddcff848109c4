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

from cpkit.oracle import Oracle, Token, Truth
from cpkit.run.sample import sample_tokens
from cpkit.worker.caches import V4, V32, row_format
from cpkit.worker.heads import own_merged_heads
from cpkit.worker.layer_step import LayerResult
from cpkit.worker.program import StepResult

MODES = ("all", "sample", "none")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest error of an output, as a share of the largest value summed, and of an LSE, as a distance.

    A distance of two LSEs is the relative error of the sums of exp behind them, whatever their size, so that 1e-4 is
    1e-4 of a sum. The oracle reads keys as the cache stores them, hence what is bounded is the fp32 arithmetic over:

        fp8 656    512 fp8 values in 4 groups with fp32 scales, 64 bf16          out 1e-4    LSE 1e-4
        fp8 584    448 fp8 values in 7 groups with power-of-2 scales, 64 bf16    out 1e-4    LSE 1e-4
    """

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
    """What one rank has verified: tokens times layers, keys that they attended beside their windows, hidden rows; the
    largest errors of outputs (as a share of the largest value) and LSEs; how many rows differ, and the first that does.
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
                merged = own_merged_heads(topology, self.rank, own) if row < layer_result.num_merged else slice(0, own)
                fault = self._fault(truth, at, layer_result, row, merged)
                self._note(step, (number, model.layers[number].kind), tokens[at], fault)
        self._check_hidden(step, result)

    def _fault(self, truth: Truth, at: int, result: LayerResult, row: int, known: slice) -> "_Fault | None":
        """What is wrong with one row, if anything; at: among the tokens of the truth. known: heads whose LSE it has."""
        chosen = torch.arange(truth.num_keys(at))  # without an index: all of them
        if result.selection is not None:
            picked = result.selection[row].cpu()
            chosen = picked[picked >= 0]
            if fault := selection_fault(truth, at, picked):
                return fault
            chosen = truth.picked_keys(at, chosen)
        self.findings.keys += len(chosen)
        attended = truth.attend(at, chosen)
        scale, bounds = attended.largest or 1.0, BOUNDS[row_format(truth.layer).name]
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


def selection_fault(truth: Truth, at: int, picked: torch.Tensor) -> _Fault | None:
    """Whether a token's selection ([k] int64, -1 behind the last) names other keys than the truth allows."""
    num_keys, index = truth.num_index_keys(at), truth.layer.index
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


def _some(keys: Iterable[int], most: int = 6) -> str:
    shown = sorted(int(key) for key in keys)
    return f"{shown[:most]}" if len(shown) <= most else f"{shown[:most]} and {len(shown) - most} more"
