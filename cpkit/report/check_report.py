"""What a comparison of ranks found, as text: the first divergence of each group in a short table."""

from cpkit.comm.call import spell_ranks
from cpkit.consistency.align import Divergence, Said
from cpkit.consistency.check import Check, Run
from cpkit.report.table import indent, plural, table

MOST_SHOWN = 4


def check_report(result: Check) -> str:
    """Runs, plans, what could not be compared, and one last line that says how it ended."""
    lines: list[str] = []
    for run in result.runs:
        lines += _run(run)
    if result.plans:
        lines.append(f"{plural(len(result.plans), 'saved plan')}: {_plans(result)}")
        lines += indent([str(one) for one in result.disagreements])
    for title, notes in (("left out", result.remarks), ("not compared", result.bad)):
        lines += [f"{title}: {note}" for note in notes]
    return "\n".join([*lines, "", _verdict(result)])


def _verdict(result: Check) -> str:
    if result.diverges:
        return "DIVERGES: ranks do not agree"
    if result.bad and not (result.runs or result.plans):
        return "NOTHING COMPARED: give logs of `cpkit record`, flight-recorder dumps, or plans of `cpkit plan --save`"
    if result.bad:
        return "INCOMPLETE: what could be compared agrees, the rest could not be"
    return "agrees"


def _plans(result: Check) -> str:
    return f"{plural(len(result.disagreements), 'field')} planned differently" if result.disagreements else "agree"


def _run(run: Run) -> list[str]:
    ranks = spell_ranks(tuple(run.histories))
    lines = [f"run {run.name}: {ranks}, {plural(run.calls, 'call')} compared"]
    for one in run.divergences[:MOST_SHOWN]:
        lines += indent(_divergence(one))
    if len(run.divergences) > MOST_SHOWN:
        lines += indent([f"... and {plural(len(run.divergences) - MOST_SHOWN, 'group')} more whose ranks part later"])
    if run.divergences:
        lines += indent(_whereabouts(run))
    return lines


def _divergence(one: Divergence) -> list[str]:
    lines = [f"{one.stream}, call {one.call}: {_what(one)}"]
    lines += indent(_table(one.said))
    if one.sites is not None:
        lines.append(f"call sites part before, at call {one.sites[0]}:")
        lines += indent(_table(one.sites[1]))
    if one.behind:
        counts = "; ".join(f"rank {rank} made {plural(one.counts[rank], 'call')}" for rank in one.behind[:MOST_SHOWN])
        lines.append(f"ahead: {spell_ranks(one.ahead)} with {plural(max(one.counts.values()), 'call')}; {counts}")
    return lines


def _what(one: Divergence) -> str:
    odd = spell_ranks(one.odd)
    if one.kind == "missing call":
        return f"missing call: not made by {odd}"
    if one.kind == "extra call":
        return f"extra call: made by {odd} alone"
    if one.kind == "never came":
        waiting = [rank for said in one.said if said.entered is not None for rank in said.ranks]
        absent = [rank for said in one.said if said.entered is None for rank in said.ranks]
        return f"{spell_ranks(absent)} never came; {spell_ranks(waiting)} entered it"
    return f"another {one.kind}: {odd}"


def _table(said: tuple[Said, ...]) -> list[str]:
    rows = []
    for one in said:
        entered = one.entered
        if entered is None:
            rows.append([spell_ranks(one.ranks), "", "not there", ""])
        else:
            state = f" [{entered.state}]" if entered.state else ""
            rows.append([spell_ranks(one.ranks), str(entered.step), f"{entered}{state}", entered.site])
    return table(["who", "step", "call", "at"], rows, "lrll")


def _whereabouts(run: Run) -> list[str]:
    """The last thing that each rank entered, in whatever group; ranks that did the same share a line."""
    said: dict[str, list[int]] = {}
    for rank, history in run.histories.items():
        last = history.last()
        end = {True: ", then ended", False: ", with no end of the process in its log", None: ""}[history.ended]
        said.setdefault(f"{last} at {last.site}{end}" if last else f"nothing{end}", []).append(rank)
    lines = [f"{spell_ranks(ranks)}: {text}" for text, ranks in said.items()]
    return ["last entered:", *indent(lines[: 2 * MOST_SHOWN])]
