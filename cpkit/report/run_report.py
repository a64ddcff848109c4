"""A run as text: what was verified, what was sent, and where the time went."""

from collections.abc import Sequence

from cpkit.report.table import count, indent, micros, plural, size, table
from cpkit.run.execute import RankReport
from cpkit.run.steps import RunSteps
from cpkit.run.verify import BOUNDS, Findings
from cpkit.settings import StepSettings
from cpkit.worker.caches import row_format
from cpkit.worker.clock import STAGES


def run_report(
    steps: RunSteps, settings: StepSettings, reports: Sequence[RankReport], where: str, data: str, mode: str
) -> str:
    """The whole report; where: what the ranks were; data: of the activations; mode: of the verification."""
    lines = [
        *_setting(steps, settings, where, data),
        f"Kernels   metadata and indexer: {reports[0].backend}; attention and merge: torch",
        "",
        *_verified(settings, reports, mode),
        "",
        *_traffic(reports),
        "",
        *_time(reports),
    ]
    return "\n".join(lines)


def total_findings(reports: Sequence[RankReport]) -> Findings:
    """Findings of all ranks together; the first mismatch is the lowest rank's."""
    parts = [report.findings for report in reports]
    return Findings(
        rows=sum(part.rows for part in parts),
        keys=sum(part.keys for part in parts),
        hidden_rows=sum(part.hidden_rows for part in parts),
        out_error=max(part.out_error for part in parts),
        lse_error=max(part.lse_error for part in parts),
        num_mismatches=sum(part.num_mismatches for part in parts),
        first=next((part.first for part in parts if part.first), None),
    )


def _setting(steps: RunSteps, settings: StepSettings, where: str, data: str) -> list[str]:
    topology, model = settings.topology, settings.model
    sizes = " ".join(f"{axis}={getattr(topology, axis)}" for axis in ("tp", "pcp", "dcp"))
    partition = settings.partition.replace("_", "-") if topology.pcp > 1 else "none (pcp=1)"
    merge = settings.merge if topology.dcp > 1 else "none (dcp=1)"
    layers = " + ".join(
        f"{layer.kind}{'' if layer.runs_index or not layer.index else ' (shares a selection)'}"
        for layer in model.layers
    )
    tokens = sum(batch.num_tokens for batch in steps.batches)
    return [
        f"Run       {model.name}, {layers}, {plural(model.num_heads, 'head')}: {where}",
        f"World     {sizes}: {plural(topology.world_size, 'rank')}; interleave {topology.interleave}, block "
        f"{topology.block_size}, partition {partition}, merge {merge}",
        f"Steps     {plural(len(steps.batches), 'step')} of {steps.name}: {plural(tokens, 'query token')}",
        f"Data      {data}",
    ]


def _verified(settings: StepSettings, reports: Sequence[RankReport], mode: str) -> list[str]:
    if mode == "none":
        return ["Verified  nothing (--verify none)"]
    findings = total_findings(reports)
    bounds = BOUNDS[row_format(settings.model.layers[0]).name]
    differ = findings.num_mismatches
    verdict = f"{count(differ)} of them DIFFER from the oracle" if differ else "no mismatch"
    rows = [
        ["rows (token, layer, rank)", f"{count(findings.rows)}, {mode}: {verdict}"],
        ["keys selected", count(findings.keys)],
        ["hidden rows", f"{count(findings.hidden_rows)}, to the bit"],
        ["largest output error", f"{findings.out_error:.1e} of the largest value (bound {bounds.out:.0e})"],
        ["largest LSE error", f"{findings.lse_error:.1e} (bound {bounds.lse:.0e})"],
    ]
    lines = ["Verified against the unsharded float64 oracle", *indent(table(["", ""], rows, "ll")[1:])]
    return lines if findings.first is None else [*lines, f"  first: {findings.first}"]


def _traffic(reports: Sequence[RankReport]) -> list[str]:
    report = reports[0]
    if not report.calls:
        return ["Collectives: none"]
    rows = [[name, count(report.calls[name]), size(report.bytes[name])] for name in sorted(report.calls)]
    rows.append(["all", count(sum(report.calls.values())), size(sum(report.bytes.values()))])
    title = "Collectives, what one rank puts in: planned = counted on every rank, call by call"
    return [title, *indent(table(["", "calls", "bytes"], rows, "lrr"))]


def _time(reports: Sequence[RankReport]) -> list[str]:
    rows = []
    for stage in STAGES:
        seconds = [report.seconds[stage] for report in reports]
        most = max(range(len(seconds)), key=seconds.__getitem__)
        mean = sum(seconds) / len(seconds)
        rows.append([stage, micros(1e6 * mean), micros(1e6 * seconds[most]), str(reports[most].rank)])
    return ["Time of a rank, waiting included", *indent(table(["stage", "mean", "most", "rank"], rows, "lrrr"))]
