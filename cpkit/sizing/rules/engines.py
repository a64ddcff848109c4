"""Which rules of its engine refuse a deployment, and what holds for it besides."""

from cpkit.sizing.deployment import Deployment
from cpkit.sizing.rules import cpkit, sglang
from cpkit.sizing.rules.rule import Note, Refusal, Rule, fill
from cpkit.sizing.rules.vllm import rules as vllm

RULES: dict[str, tuple[Rule, ...]] = {
    "vllm": vllm.RULES,
    "sglang": sglang.RULES,
    "cpkit": cpkit.RULES,
}
NOTES: dict[str, tuple[Note, ...]] = {
    "vllm": vllm.NOTES,
    "sglang": sglang.NOTES,
    "cpkit": cpkit.NOTES,
}


def broken_rules(deployment: Deployment) -> tuple[Rule, ...]:
    """Every rule of the engine that refuses the deployment, in the rules' order."""
    return tuple(rule for rule in RULES[deployment.engine] if rule.breaks(deployment))


def refusals(deployment: Deployment) -> tuple[Refusal, ...]:
    """The broken rules with the deployment's values in their sentences."""
    return tuple(
        Refusal(rule, fill(rule.sentence, deployment), fill(rule.change, deployment))
        for rule in broken_rules(deployment)
    )


def notes(deployment: Deployment) -> tuple[tuple[Note, str], ...]:
    """Notes that hold for the deployment, with their sentences."""
    return tuple((note, fill(note.sentence, deployment)) for note in NOTES[deployment.engine] if note.holds(deployment))
