"""Names under which people serve the shipped models."""

from cpkit.model import MODELS

SAME_FACTS = frozenset(
    (
        "awq",
        "base",
        "bf16",
        "exp",
        "fp4",
        "fp8",
        "int4",
        "mxfp4",
        "mxfp8",
        "nvfp4",
        "speciale",
        "w4a8",
        "w4afp8",
        "w8a8",
    )
)
"""Endings of repository names whose attention and caches are those of the model itself."""


def known_model(name: str) -> str:
    """The shipped name behind an engine's, or the name as it is.  deepseek-ai/DeepSeek-V3.2-Exp -> deepseek-v3.2"""
    plain = name.rstrip("/").rpartition("/")[2].lower()
    for known in sorted(MODELS, key=len, reverse=True):
        if plain == known:
            return known
        rest = plain.removeprefix(f"{known}-")
        if rest != plain and set(rest.split("-")) <= SAME_FACTS:
            return known
    return name
