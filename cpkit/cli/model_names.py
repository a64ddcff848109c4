"""Names under which people serve the shipped models, and what their endings say of the weights."""

from pathlib import Path

from cpkit.model import MODELS

ENDING_BITS = {
    "awq": 4,
    "base": None,
    "bf16": 16,
    "exp": None,
    "fp4": 4,
    "fp8": 8,
    "int4": 4,
    "mxfp4": 4,
    "mxfp8": 8,
    "nvfp4": 4,
    "speciale": None,
    "w4a8": 4,
    "w4afp8": 4,
    "w8a8": 8,
}
"""Endings of repository names whose attention and caches are those of the model itself, and bits of their weights."""


def named_model(name: str) -> str:
    """What to load for a name that was given: a path that is there, else the shipped model that it is a name of."""
    return name if Path(name).exists() else known_model(name)


def known_model(name: str) -> str:
    """The shipped name behind an engine's, or the name as it is.  deepseek-ai/DeepSeek-V3.2-Exp -> deepseek-v3.2"""
    known, _ = _split(name)
    return name if known is None else known


def ending_bits(name: str) -> int | None:
    """Bits of the weights that the ending of a known model's name states; None: it states none.  GLM-5.2-NVFP4 -> 4"""
    _, endings = _split(name)
    return min((bits for ending in endings if (bits := ENDING_BITS[ending])), default=None)


def _split(name: str) -> tuple[str | None, list[str]]:
    """The shipped name and the endings behind it; None and no endings where it is not one of them."""
    plain = name.rstrip("/").rpartition("/")[2].lower()
    for known in sorted(MODELS, key=len, reverse=True):
        if plain == known:
            return known, []
        rest = plain.removeprefix(f"{known}-")
        endings = rest.split("-")
        if rest != plain and ENDING_BITS.keys() >= set(endings):
            return known, endings
    return None, []
