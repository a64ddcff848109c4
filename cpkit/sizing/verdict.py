"""The answer about a deployment: yes or no, why, what else holds, what would be legal, and what memory holds."""

from dataclasses import dataclass
from typing import Any

from cpkit.errors import ConfigError
from cpkit.sizing.deployment import ENGINES, Deployment
from cpkit.sizing.memory.deployment import Limits, cached_model, memory_settings
from cpkit.sizing.memory.plan import Memory, cache_rows, plan_memory
from cpkit.sizing.rules.engines import RULES, notes, refusals
from cpkit.sizing.rules.rule import Note, Refusal
from cpkit.sizing.rules.search import Near, nearest


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was asked and what came of it.

    assumed: settings that were chosen because nothing was said. notes: what holds without refusing. near: legal
    settings, nearest first, where the rules refuse; near_memory: of a rank under each, None where nothing fits or no
    chip is named. memory: of a rank, with a chip and legal settings; no_room: why
    there is none; unplanned: why it cannot be told, where an engine takes what cpkit's planner does not.
    """

    deployment: Deployment
    assumed: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[tuple[Note, str], ...]
    near: tuple[Near, ...]
    near_memory: tuple[Memory | None, ...]
    memory: Memory | None
    no_room: str | None
    unplanned: str | None

    @property
    def works(self) -> bool:
        """No rule refuses it, and as far as memory was looked at there is room for keys."""
        return not self.refusals and self.no_room is None

    @property
    def num_rules(self) -> int:
        """Rules of the engine that were tried."""
        return len(RULES[self.deployment.engine])


def judge(deployment: Deployment, limits: Limits, assumed: tuple[str, ...] = ()) -> Verdict:
    """Try every rule; then look for what is near, or at memory where a chip is named."""
    refused = refusals(deployment)
    near = nearest(deployment) if refused else ()
    memory, no_room, unplanned = (None, None, None) if refused else _memory(deployment, limits)
    return Verdict(
        deployment=deployment,
        assumed=assumed,
        refusals=refused,
        notes=notes(deployment),
        near=near,
        near_memory=tuple(_memory(it.deployment, limits)[0] for it in near),
        memory=memory,
        no_room=no_room,
        unplanned=unplanned,
    )


def _memory(deployment: Deployment, limits: Limits) -> tuple[Memory | None, str | None, str | None]:
    """Memory of a rank, or why there is no room, or why the planner cannot tell; nothing without a chip."""
    if deployment.chip is None:
        return None, None, None
    try:
        settings = memory_settings(deployment, limits)
    except ConfigError as error:
        return None, None, str(error)
    try:
        return plan_memory(settings), None, None
    except ConfigError as error:
        return None, str(error), None


def token_bytes(deployment: Deployment) -> float:
    """Bytes of cache on one rank that a token of context takes; needs a world that exists."""
    rows = cache_rows(
        cached_model(deployment),
        deployment.topology(),
        replicates_index=deployment.replicates_index,
        draft_layers=deployment.draft_layers,
    )
    return sum(row.per_token for row in rows)


def verdict_data(verdict: Verdict, length: int) -> dict[str, Any]:
    """Plain data: what `cpkit doctor --json` writes. length: tokens of the requests that are counted."""
    d = verdict.deployment
    return {
        "format": "cpkit-doctor-1",
        "works": verdict.works,
        "engine": ENGINES[d.engine],
        "model": d.model.name,
        "chip": d.chip.name if d.chip else None,
        "gpus": d.num_gpus,
        "settings": {name: _plain(value) for name, value in _settings(d).items()},
        "assumed": list(verdict.assumed),
        "rules": verdict.num_rules,
        "refusals": [
            {"id": it.rule.id, "sentence": it.sentence, "change": it.change, "source": it.rule.source}
            for it in verdict.refusals
        ],
        "notes": [{"id": note.id, "sentence": text, "source": note.source} for note, text in verdict.notes],
        "nearest": [
            {
                "distance": near.distance,
                "gpus": near.deployment.num_gpus,
                "token_bytes": token_bytes(near.deployment),
                "tokens": memory.tokens if memory else None,
                "changes": [
                    {"setting": name, "asked": _plain(asked), "here": _plain(here)}
                    for name, asked, here in near.changes
                ],
            }
            for near, memory in zip(verdict.near, verdict.near_memory, strict=True)
        ],
        "no_room": verdict.no_room,
        "unplanned": verdict.unplanned,
        "memory": _memory_data(verdict.memory, length) if verdict.memory else None,
    }


def _settings(deployment: Deployment) -> dict[str, Any]:
    return {
        name: getattr(deployment, name)
        for name in Deployment.__dataclass_fields__
        if name not in ("engine", "model", "chip")
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _memory_data(memory: Memory, length: int) -> dict[str, Any]:
    return {**memory.to_json(), "request_length": length, "requests": memory.requests(length)}
