"""Which rules refuse a deployment, and what holds for it besides.

for refusal in refusals(deployment):
    refusal.rule.id, refusal.sentence, refusal.rule.source, refusal.change
"""

from cpkit.sizing import rules_cpkit, rules_sglang, rules_vllm
from cpkit.sizing.rules_deployment import Deployment
from cpkit.sizing.rules_rule import Note, Refusal, Rule, fill

RULES: dict[str, tuple[Rule, ...]] = {
    "vllm": rules_vllm.RULES,
    "sglang": rules_sglang.RULES,
    "cpkit": rules_cpkit.RULES,
}
NOTES: dict[str, tuple[Note, ...]] = {
    "vllm": rules_vllm.NOTES,
    "sglang": rules_sglang.NOTES,
    "cpkit": rules_cpkit.NOTES,
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
