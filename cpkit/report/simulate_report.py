"""A replay as text, for the engineer who will choose the sizes."""

from textwrap import wrap

from cpkit.promises.violation import RULES
from cpkit.report.cost_report import cost_report
from cpkit.report.table import count, every, indent, micros, plural, share, size, table
from cpkit.report.words import merge_text, partition_text, sizes_text, stages_text
from cpkit.simulate.result import Quantiles, Simulation

PEAKS_HEADER = ("", "peak", "limit", "of limit")
BALANCE_NAMES = {
    "tokens": "query tokens",
    "causal_work": "causal work (query x key pairs)",
    "stored_keys": "keys stored",
}
MAX_VIOLATIONS = 5
LINE = 115


def simulate_report(simulation: Simulation, pool_source: str, pool_note: str = "") -> str:
    """The whole report; pool_source says where the number of KV blocks comes from, pool_note what is assumed for it."""
    lines = [
        *_setting(simulation, pool_source, pool_note),
        "",
        *_replay(simulation),
        "",
        *([] if simulation.cost is None else [*cost_report(simulation.cost), ""]),
        *_promises(simulation),
        "",
        *_balance(simulation),
        "",
        *_traffic(simulation),
        "",
        *_peaks(simulation),
        "",
        *_planner(simulation),
    ]
    return "\n".join(lines)


def _setting(simulation: Simulation, pool_source: str, pool_note: str) -> list[str]:
    settings, replay = simulation.settings, simulation.replay
    topology, budget = settings.topology, settings.budget
    replicas = f" (this trace on one of {topology.dp} replicas)" if topology.dp > 1 else ""
    drafts = f", {plural(budget.num_speculative_tokens, 'draft token')}" if budget.num_speculative_tokens else ""
    partition, merge = partition_text(settings.partition, topology), merge_text(settings.merge, topology)
    pool = f"KV pool   {replay.num_kv_blocks:,} blocks of {plural(topology.virtual_block, 'token')} (block x dcp); "
    lines = [
        f"Trace     {simulation.trace.name} ({simulation.trace.format}), seed {replay.seed}",
        f"World     {settings.model.name}, {sizes_text(topology)}: {plural(simulation.num_ranks, 'rank')}{replicas}; "
        f"interleave {topology.interleave}, block {topology.block_size}",
        f"Choices   partition {partition}, merge {merge}",
        f"Limits    {plural(budget.max_num_batched_tokens, 'token')} and {plural(budget.max_num_seqs, 'request')} "
        f"a step{drafts}, {plural(replay.max_model_len, 'token')} a request",
        *wrap(pool + pool_source, LINE, subsequent_indent=" " * 10, break_on_hyphens=False),
    ]
    notes = [*simulation.trace.notes, *([pool_note] if pool_note else [])]
    return lines + [
        line
        for note in notes
        for line in wrap(note, LINE, initial_indent="Note      ", subsequent_indent=" " * 10, break_on_hyphens=False)
    ]


def _replay(simulation: Simulation) -> list[str]:
    stats = simulation.stats
    requests = len(simulation.trace.requests)
    unfinished = requests - stats.num_finished - stats.num_refused
    left = f", {unfinished:,} not finished" if unfinished else ""
    prefill = simulation.num_tokens - simulation.num_decode_tokens
    lines = ["Replay" if simulation.complete else "Replay, INTERRUPTED: all figures are of the steps so far"]
    rows = [
        ["requests", f"{requests:,}: {stats.num_finished:,} finished, {stats.num_refused:,} refused{left}"],
        *[["", f"  {number:,} refused: {reason}"] for reason, number in stats.refused.items()],
        ["steps", f"{simulation.num_steps:,} in {stats.elapsed_s:,.1f} s of simulated time"],
        ["tokens", f"{simulation.num_tokens:,}: {prefill:,} of prompts, {simulation.num_decode_tokens:,} of decodes"],
        [
            "prefix hits",
            f"{share(stats.prefix_hit_tokens, stats.prompt_tokens)} of {stats.prompt_tokens:,} prompt tokens",
        ],
        ["preemptions", count(stats.num_preemptions)],
        ["first token", f"{_seconds(simulation.ttft_s)} after a request could start"],
        ["last token", f"{_seconds(simulation.latency_s)}, both by {clock_text(simulation)}"],
    ]
    if simulation.trace.num_skipped:
        rows.insert(1, ["", f"  {plural(simulation.trace.num_skipped, 'malformed line')} skipped"])
    return lines + indent(table(["", ""], rows, "ll")[1:])


def clock_text(simulation: Simulation) -> str:
    """What a replay's times are from."""
    cost = simulation.cost
    if cost is None:
        return "the step clock, a rough estimate"
    layers = f" with layers of {cost.engine}" if cost.engine else ""
    return f"the cost model of {cost.chip}{layers}, an estimate"


def _seconds(quantiles: Quantiles) -> str:
    return f"{quantiles.p50:,.1f} s p50, {quantiles.p99:,.1f} s p99"


def _promises(simulation: Simulation) -> list[str]:
    if not simulation.num_checked:
        return ["Promises  not checked"]
    of = plural(simulation.num_steps, "step")
    checked = f"{simulation.num_checked:,} of {of} checked on {every(simulation.num_ranks, 'rank')}"
    lines = [
        f"Promises  {plural(simulation.num_violations, 'violation')}; {checked}",
    ]
    if not simulation.num_violations:
        return [
            *lines,
            "  cover    every query token computed once, every key stored once in a slot of its own",
            "  agree    all ranks derive the same chunks, padded sizes and collectives",
            "  bounded  tokens, requests, workspace and logits within their limits",
        ]
    shown = [(step.index, violation) for step in simulation.broken for violation in step.violations]
    for index, violation in shown[:MAX_VIOLATIONS]:
        lines.append(f"  step {index}: {violation}")
        lines.append(f"    promised: {RULES[violation.promise][violation.rule]}")
    if simulation.num_violations > MAX_VIOLATIONS:
        lines.append(
            f"  ... {simulation.num_violations - MAX_VIOLATIONS:,} more in {plural(simulation.num_broken, 'step')}"
        )
    return lines


def _balance(simulation: Simulation) -> list[str]:
    rows = [[BALANCE_NAMES[name], *_ratios(quantiles)] for name, quantiles in simulation.balance.items()]
    title = "Balance over ranks, largest / mean in each step (1.000 is even)"
    return [title, *indent(table(["", "p50", "p99"], rows, "lrr"))]


def _ratios(quantiles: Quantiles) -> list[str]:
    return [f"{quantiles.p50:.3f}", f"{quantiles.p99:.3f}"]


def _traffic(simulation: Simulation) -> list[str]:
    steps = max(simulation.num_steps, 1)
    rows = [
        [
            f"{op} over {group}",
            count(total.calls),
            size(total.bytes),
            count(round(total.calls / steps)),
            size(total.bytes / steps),
        ]
        for (op, group), total in simulation.traffic.items()
    ]
    if not rows:
        return ["Collectives: none"]
    header = ["", "calls", "bytes", "calls a step", "bytes a step"]
    stages = stages_text(simulation.settings.topology)
    return [f"Collectives, what one rank puts in{stages}", *indent(table(header, rows, "lrrrr"))]


def peaks_rows(simulation: Simulation) -> list[list[str]]:
    """Rows under PEAKS_HEADER: the most that any step held, beside its limit."""
    peaks, budget, usable = simulation.peaks, simulation.settings.budget, simulation.replay.num_kv_blocks - 1
    workspace, logits = (peaks.workspace_tokens, budget.workspace_tokens), (peaks.logits_bytes, budget.logits_bytes)
    return [
        ["KV blocks held", count(peaks.kv_blocks), count(usable), share(peaks.kv_blocks, usable)],
        ["workspace tokens", *map(count, workspace), share(*workspace)],
        ["indexer logits", *map(size, logits), share(*logits)],
    ]


def _peaks(simulation: Simulation) -> list[str]:
    return ["Peaks", *indent(table(PEAKS_HEADER, peaks_rows(simulation), "lrrr"))]


def _planner(simulation: Simulation) -> list[str]:
    one, ranks = simulation.planner_us, simulation.planner_all_us
    rows = [
        ["one rank", micros(one.p50), micros(one.p99)],
        [every(simulation.num_ranks, "rank"), micros(ranks.p50), micros(ranks.p99)],
    ]
    rate = simulation.num_steps / simulation.wall_s if simulation.wall_s else 0.0
    took = f"  the whole replay took {simulation.wall_s:,.1f} s ({rate:,.{int(rate < 10)}f} steps/s)"
    return ["Planner, time a step", *indent(table(["", "p50", "p99"], rows, "lrr")), took]
