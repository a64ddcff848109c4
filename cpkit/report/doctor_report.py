"""`cpkit doctor` as text: the answer first, then why, what would be legal, and what memory holds."""

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from cpkit.report.table import count, indent, plural, size, table
from cpkit.sizing.deployment import ENGINES, Deployment
from cpkit.sizing.memory.deployment import Knob
from cpkit.sizing.memory.plan import Memory
from cpkit.sizing.rules.rule import Refusal
from cpkit.sizing.rules.search import Near
from cpkit.sizing.verdict import Verdict, token_bytes

LINE, CLIP, SOURCE = 110, 118, 80


def doctor_report(verdict: Verdict, length: int, knobs: Iterable[Knob] = (), *, detail: bool = False) -> str:
    """The whole report. length: tokens of the requests counted; knobs: with detail, other choices for memory."""
    blocks = [_answer(verdict)]
    if verdict.refusals:
        blocks += [_refusal(refusal) for refusal in verdict.refusals]
        blocks.append(_nearest(verdict))
    if verdict.memory:
        blocks.append(_capacity(verdict.memory, length))
        if detail:
            blocks += [_caches(verdict.memory), _buffers(verdict.memory), _knobs(verdict.memory, length, knobs)]
    blocks.append(_besides(verdict))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _answer(verdict: Verdict) -> list[str]:
    d = verdict.deployment
    where = f"{plural(d.num_gpus, 'GPU')}{f' ({d.chip.name})' if d.chip else ''}"
    lines = [f"{'Yes' if verdict.works else 'No'}: {d.model.name}, {ENGINES[d.engine]}, {_sizes(d)} on {where}"]
    if verdict.refusals:
        refuse = "refuses" if len(verdict.refusals) == 1 else "refuse"
        lines.append(f"    {len(verdict.refusals)} of {verdict.num_rules} rules {refuse} it")
    elif verdict.no_room is not None:
        lines += [f"    none of {verdict.num_rules} rules refuses it, but memory does:", *_wrapped(verdict.no_room, 4)]
    else:
        lines.append(f"    none of {verdict.num_rules} rules refuses it")
    return lines


def _sizes(deployment: Deployment) -> str:
    """Sizes by the engine's count.  tp=8 dcp=4"""
    names = ("dp", "pp", "tp", "pcp", "dcp", "attn_dp", "moe_dp")
    used = [name for name in names if name == "tp" or getattr(deployment, name) > 1]
    return " ".join(f"{name.replace('_', '-')}={getattr(deployment, name)}" for name in used)


def _refusal(refusal: Refusal) -> list[str]:
    return [
        refusal.rule.id,
        *_wrapped(refusal.sentence, 4),
        *_wrapped(f"way out: {refusal.change}", 4),
        *_wrapped(f"source:  {refusal.rule.source}", 4),
    ]


def _nearest(verdict: Verdict) -> list[str]:
    if not verdict.near:
        return ["Nearest legal settings: none found near these"]
    rows = [_near_row(near, memory) for near, memory in zip(verdict.near, verdict.near_memory, strict=True)]
    lines = table(["distance", "GPUs", "KV B a token a rank", "room for tokens", "change"], rows, "rrrrl")
    told = next((_room_source(memory) for memory in verdict.near_memory if memory), [])
    return ["Nearest legal settings, found by the same rules", *indent([*lines, *told])]


def _room_source(memory: Memory) -> list[str]:
    """How room was counted, in a line."""
    weights, share = memory.settings.weights, memory.settings.utilization
    hbm = size(memory.settings.chip.hbm_bytes.value)
    how = "estimated" if weights.kind == "assumed" else weights.kind
    return [f"room: counted, {share.value:.0%} ({share.kind}) of {hbm} (hardware file), weights {how}"]


def _near_row(near: Near, memory: Memory | None) -> list[str]:
    changes = ", ".join(
        f"{name.replace('_', '-')} {_word(asked)} -> {_word(here)}" for name, asked, here in near.changes
    )
    room = count(memory.tokens) if memory else ("none" if near.deployment.chip else "-")
    return [
        f"{near.distance:.1f}",
        count(near.deployment.num_gpus),
        f"{token_bytes(near.deployment):,.0f}",
        room,
        changes,
    ]


def _word(value: Any) -> str:
    """A value as people write it.  None -> unset, frozenset({"lora"}) -> lora"""
    if isinstance(value, frozenset):
        return "+".join(sorted(value)) or "none"
    return "unset" if value is None else str(value)


def _capacity(memory: Memory, length: int) -> list[str]:
    given = memory.settings
    held = memory.buffer_bytes
    taken = ", out of what is not usable" if given.buffers_beside else ""
    rows = [
        ["memory", size(given.chip.hbm_bytes.value), f"hardware file: {given.chip.hbm_bytes.source}"],
        ["  usable", f"{given.utilization.value:.0%}", f"{given.utilization.kind}: {given.utilization.source}"],
        ["  weights", size(given.weights.value), f"{given.weights.kind}: {given.weights.source}"],
        ["  buffers", size(held), f"counted: workspace, logits, collectives of the largest steps{taken}"],
        ["  left for KV", size(memory.room), "counted"],
        ["KV of a token", f"{memory.token_bytes:,.0f} B", f"counted: all layers, {_sharing(memory)}"],
        ["room", f"{count(memory.tokens)} tokens", f"counted: {count(memory.num_blocks)} blocks x "
         f"{given.topology.virtual_block} tokens, one replica"],
        ["", f"{count(memory.requests(length))} requests", f"counted: of {count(length)} tokens each, at once"],
    ]  # fmt: skip
    lines = table(["", "", ""], [part for row in rows for part in _parts(row)], "lrl")
    if any(layer.kind == "linear" for layer in given.model.layers):
        lines.append("not counted: the states of linear layers")
    return ["Memory of one rank", *indent(lines[1:])]


def _parts(row: list[str]) -> list[list[str]]:
    """A row, its source over as many lines as it takes."""
    first, *rest = wrap(row[2], SOURCE)
    return [[row[0], row[1], first], *(["", "", f"  {text}"] for text in rest)]


def _sharing(memory: Memory) -> str:
    dcp = memory.settings.topology.dcp
    if dcp == 1:
        return "every rank keeps all keys"
    index = "indexer keys replicated" if memory.settings.replicates_index else "indexer keys sharded"
    return f"keys sharded over dcp={dcp}, {index}"


def _caches(memory: Memory) -> list[str]:
    rows = [
        [
            row.kind,
            count(row.num_layers),
            f"{row.keys:,.1f}",
            f"{row.index:,.1f}",
            size(row.window) if row.window else "-",
        ]
        for row in memory.rows
    ]
    header = ["layers", "number", "keys, B a token", "indexer keys, B a token", "windows, a request"]
    return [f"Caches of one rank by kind of layer ({_sharing(memory)})", *indent(table(header, rows, "lrrrr"))]


def _buffers(memory: Memory) -> list[str]:
    rows = [[buffer.name, size(buffer.bytes), buffer.why] for buffer in memory.buffers]
    return [
        "Buffers of one rank, counted as if all were held at once",
        *indent([_clip(line) for line in table(["", "size", "why"], rows, "lrl")]),
    ]


def _knobs(memory: Memory, length: int, knobs: Iterable[Knob]) -> list[str]:
    rows = [_knob_row("as asked", "", memory, memory, length)]
    rows += [_knob_row(knob.name, knob.setting, knob.memory, memory, length, knob.but) for knob in knobs]
    header = ["knob", "setting", "KV B a token", "tokens", "requests", "gain", "but"]
    lines = [_clip(line) for line in table(header, rows, "llrrrrl")]
    return [f"What each knob buys (requests of {count(length)} tokens; gain: tokens against what was asked)",
            *indent(lines)]  # fmt: skip


def _knob_row(
    name: str, setting: str, memory: Memory | None, asked: Memory, length: int, problem: str = ""
) -> Sequence[str]:
    if memory is None:
        return [name, setting, "-", "-", "-", "-", problem]
    gain = memory.tokens / asked.tokens
    gpus = memory.settings.topology.world_size / asked.settings.topology.world_size
    but = [f"{gpus:g} x the GPUs"] if gpus != 1 else []
    but += [problem] if problem else []
    return [
        name,
        setting,
        f"{memory.token_bytes:,.0f}",
        count(memory.tokens),
        count(memory.requests(length)),
        f"{gain:.2f} x",
        "; ".join(but),
    ]


def _besides(verdict: Verdict) -> list[str]:
    lines: list[str] = []
    for text in verdict.assumed:
        lines += _wrapped(text, 10, first="Assumed   ")
    if verdict.unplanned:
        lines += _wrapped(
            f"memory is not counted, since cpkit does not plan this: {verdict.unplanned}", 10, first="Note      "
        )
    for note, text in verdict.notes:
        lines += _wrapped(f"{text} [{note.id}]", 10, first="Note      ")
    return lines


def _wrapped(text: str, by: int, first: str | None = None) -> list[str]:
    """Lines of at most LINE characters, moved to the right."""
    return wrap(text, LINE, initial_indent=" " * by if first is None else first, subsequent_indent=" " * by)


def _clip(line: str) -> str:
    """A line of a table, cut where it is too long to be read."""
    return line if len(line) <= CLIP else f"{line[: CLIP - 3].rstrip()}..."
