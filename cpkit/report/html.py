"""A replay as one page for a browser: the report's tables, pictures of its distributions, and the report as text.

The page is whole: nothing is fetched, no script runs. It is laid out for a phone's width and grows into two columns.
"""

from collections.abc import Iterator, Sequence
from html import escape

from cpkit.report.cost_report import duration, kinds_text
from cpkit.report.html_levels import Levels
from cpkit.report.html_svg import bars, columns, distribution, levels
from cpkit.report.pictures.canvas import wait_text
from cpkit.report.simulate_report import BALANCE_NAMES, PEAKS_HEADER, clock_text, peaks_rows
from cpkit.report.table import count, every, micros, plural, share, size
from cpkit.report.words import merge_text, partition_text, sizes_text
from cpkit.simulate.cost import ReplayCost
from cpkit.simulate.result import Simulation, quantiles

STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto; padding: 12px;
       max-width: 1100px }
h1 { font-size: 1.3em; margin: .2em 0 } h2 { font-size: 1.05em; margin: 0 0 .4em }
p { margin: .3em 0 } h1, p { overflow-wrap: anywhere }
.note { color: #666; font-size: .88em }
main { columns: 340px; column-gap: 22px; margin-top: 16px }
section { break-inside: avoid; padding-bottom: 20px }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9em; width: 100% }
th, td { padding: 3px 8px 3px 0; text-align: right; border-bottom: 1px solid #e5e5e5;
         font-variant-numeric: tabular-nums }
td + td { white-space: nowrap }
th { font-weight: 600; color: #555 } th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto; max-width: 560px; display: block }
pre { overflow-x: auto; font-size: 12px; background: #f6f6f6; padding: 8px }
.bad { color: #b03000; font-weight: 600 }
"""
COLUMNS = 240
"""Columns of time in a picture of levels."""

MAX_PARTS = 12
"""Stages and collectives that are drawn; the smallest share a bar."""


def page(simulation: Simulation, seen: Levels, report: str, pool_note: str = "") -> str:
    """The page; seen: the levels of its steps; report: the same replay as text; pool_note: what its pool assumes."""
    title = f"{simulation.settings.model.name}, {sizes_text(simulation.settings.topology)}: {simulation.trace.name}"
    sections = [
        *_replay(simulation),
        *_waits(simulation),
        *_pressure(simulation, seen),
        *([] if simulation.cost is None else _cost(simulation.cost)),
        *_plans(simulation),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *_setting(simulation, pool_note),
            "<main>",
            *sections,
            "</main>",
            f"<details><summary>The report as text</summary><pre>{escape(report)}</pre></details>",
            "</body></html>\n",
        ]
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are escaped; an empty header is left out."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if any(header) else ""}{body}</table></div>'


def section(title: str, *parts: str) -> str:
    """One block of the page."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def note(text: str) -> str:
    """A line in small."""
    return f'<p class="note">{escape(text)}</p>'


def _setting(simulation: Simulation, pool_note: str) -> Iterator[str]:
    settings, replay = simulation.settings, simulation.replay
    topology, budget = settings.topology, settings.budget
    yield (
        f"<p>{plural(simulation.num_ranks, 'rank')}; interleave {topology.interleave}, block {topology.block_size}; "
        f"partition {partition_text(settings.partition, topology)}, merge {merge_text(settings.merge, topology)}</p>"
    )
    yield note(
        f"Limits: {budget.max_num_batched_tokens:,} tokens and {budget.max_num_seqs:,} requests a step, "
        f"{replay.max_model_len:,} tokens a request, {replay.num_kv_blocks:,} KV blocks of {topology.virtual_block:,} "
        f"tokens; trace {simulation.trace.format}, seed {replay.seed}"
    )
    yield from (note(text) for text in (*simulation.trace.notes, pool_note) if text)
    if not simulation.complete:
        yield '<p class="bad">Interrupted: all figures are of the steps so far.</p>'
    if simulation.num_violations:
        broken = plural(simulation.num_broken, "step")
        yield f'<p class="bad">{plural(simulation.num_violations, "violation")} of promises in {broken}.</p>'


def _replay(simulation: Simulation) -> Iterator[str]:
    stats = simulation.stats
    rows = [
        ["requests", count(len(simulation.trace.requests))],
        ["finished", count(stats.num_finished)],
        ["refused", count(stats.num_refused)],
        *[[f"refused: {reason}", count(number)] for reason, number in stats.refused.items()],
        ["steps", count(simulation.num_steps)],
        ["simulated time", f"{stats.elapsed_s:,.1f} s"],
        ["tokens computed", count(simulation.num_tokens)],
        ["of them decodes'", count(simulation.num_decode_tokens)],
        ["prompt tokens found in the cache", share(stats.prefix_hit_tokens, stats.prompt_tokens)],
        ["preemptions", count(stats.num_preemptions)],
        ["steps checked", count(simulation.num_checked)],
        ["promises violated", count(simulation.num_violations)],
    ]
    yield section("Replay", table(["", ""], rows))


def _waits(simulation: Simulation) -> Iterator[str]:
    stats = simulation.stats
    waits = {
        "time to first token": stats.ttft_s,
        "  of it in the queue": stats.queue_s,
        "time per output token": stats.tpot_s,
        "time to last token": stats.latency_s,
    }
    found = {name: quantiles(values) for name, values in waits.items()}
    rows = [[name, duration(two.p50), duration(two.p99)] for name, two in found.items()]
    yield section("Waits", table(["", "p50", "p99"], rows), note(f"Times by {clock_text(simulation)}."))
    yield section(
        "Time to first token", distribution("Distribution of the time to first token", stats.ttft_s, wait_text)
    )
    yield section(
        "Time per output token", distribution("Distribution of the time per output token", stats.tpot_s, wait_text)
    )


def _pressure(simulation: Simulation, seen: Levels) -> Iterator[str]:
    end_s = simulation.stats.elapsed_s
    held = seen.columns("held_blocks", COLUMNS, end_s)
    usable = simulation.replay.num_kv_blocks - 1
    yield section("Peaks", table(PEAKS_HEADER, peaks_rows(simulation)))
    yield section(
        "KV blocks held",
        levels("KV blocks held over time", [("blocks", held)], end_s, _whole),
        note(f"Of {usable:,} usable blocks; each column shows the most in its span of time."),
    )
    lines = [(name, seen.columns(name, COLUMNS, end_s)) for name in ("running", "waiting")]
    yield section("Requests", levels("Requests running and waiting over time", lines, end_s, _whole))


def _cost(cost: ReplayCost) -> Iterator[str]:
    rows = [["KV blocks held", *(share(value, 1.0) for value in (cost.kv.mean, cost.kv.p99, cost.kv.most))]]
    for name, level in (("running", cost.running), ("waiting", cost.waiting)):
        rows.append([f"requests {name}", f"{level.mean:,.1f}", f"{level.p99:,.0f}", f"{level.most:,.0f}"])
    yield section(
        "Rates and pressure, by time",
        table(["", "mean", "p99", "most"], rows),
        f"<p>{cost.prompt_tokens_s:,.0f} prompt and {cost.output_tokens_s:,.0f} output tokens/s, "
        f"{cost.per_gpu:,.0f} a GPU; steps run {share(cost.busy, 1.0)} of the time</p>",
    )
    parts = [(name, seconds) for name, seconds in cost.stages.items()]
    parts += [(f"{name} (collective)", seconds) for name, seconds in cost.collectives.items()]
    total = sum(seconds for _, seconds in parts)
    ordered = [(name, seconds) for name, seconds in sorted(parts, key=lambda part: -part[1]) if seconds]
    if len(ordered) > MAX_PARTS:
        others = ordered[MAX_PARTS - 1 :]
        ordered[MAX_PARTS - 1 :] = [(f"{len(others)} others", sum(seconds for _, seconds in others))]
    yield section(
        "Where the steps' seconds go",
        bars(
            "Seconds by stage and collective",
            [(name, seconds, f"{seconds:,.1f} s, {share(seconds, total)}") for name, seconds in ordered],
        ),
        note(f"Sources: {kinds_text(cost.kinds)}."),
    )
    if len(cost.idle) > 1:
        idle = [(str(rank), part) for rank, part in cost.idle.items()]
        yield section(
            "Idle ranks",
            columns("Share of the steps' time that a rank waits", idle, lambda part: f"{100 * part:.3g}%", "rank"),
            note("Share of the steps' time that the first rank of each PCP place waits for slower ones."),
        )


def _plans(simulation: Simulation) -> Iterator[str]:
    balance = [[BALANCE_NAMES[name], f"{two.p50:.3f}", f"{two.p99:.3f}"] for name, two in simulation.balance.items()]
    yield section(
        "Balance over ranks", table(["", "p50", "p99"], balance), note("Largest / mean in each step; 1.000 is even.")
    )
    if simulation.traffic:
        ordered = sorted(simulation.traffic.items(), key=lambda item: -item[1].bytes)
        named = [(f"{op} over {group}", total) for (op, group), total in ordered]
        rows = [[name, count(total.calls), size(total.bytes)] for name, total in named]
        yield section(
            "Bytes by collective",
            bars(
                "Bytes that one rank puts in, by collective",
                [(name, float(total.bytes), size(total.bytes)) for name, total in named],
            ),
            table(["", "calls", "bytes"], rows),
            note("What one rank puts in, all steps and layers; counted from the plans."),
        )
    one, ranks = simulation.planner_us, simulation.planner_all_us
    planner = [
        ["one rank", micros(one.p50), micros(one.p99)],
        [every(simulation.num_ranks, "rank"), micros(ranks.p50), micros(ranks.p99)],
    ]
    yield section("Planner, time a step", table(["", "p50", "p99"], planner), note("Measured here."))


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 5 or value == int(value) else f"{value:.1f}"
