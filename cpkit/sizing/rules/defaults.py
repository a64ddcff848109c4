"""What an engine is taken to choose where nothing is said; each choice is told."""

from collections.abc import Mapping
from typing import Any

from cpkit.model import Model
from cpkit.sizing.chips import Chip
from cpkit.sizing.deployment import ENGINES, Deployment
from cpkit.sizing.rules.backends import backend

TRANSFERS_WITH_RULES = ("nixl", "mooncake")

NAMES_OF_FAMILY = ("dsa", "nsa", "auto")
"""Attention backends that only say that keys are selected; the engine picks one that does."""

FP8_OF_VLLM = ("auto", "fp8", "fp8_e4m3")
"""Cache dtypes that vLLM's FlashMLA sparse keeps as fp8_ds_mla."""


def complete(engine: str, model: Model, chip: Chip | None, given: Mapping[str, Any]) -> tuple[Deployment, list[str]]:
    """A deployment from the settings that were given, and a sentence for each that was chosen for them."""
    settings = dict(given)
    assumed = []

    def choose(name: str, value: Any, why: str) -> None:
        settings[name] = value
        assumed.append(f"{name.replace('_', '-')} {value}: {why}")

    if settings.get("attention_backend") in (None, *NAMES_OF_FAMILY):
        settings.pop("attention_backend", None)
        if engine in ENGINES and engine != "cpkit":
            name = _backend(engine, chip)
            choose("attention_backend", name, f"what {engine} is taken to pick on {chip.name if chip else 'NVIDIA'}")
    elif known := backend(engine, settings["attention_backend"]):
        settings["attention_backend"] = known.name
    if "block_size" not in settings:
        size, why = _block_size(engine, model)
        choose("block_size", size, why)
    if "kv_cache_dtype" not in settings or settings["kv_cache_dtype"] == "auto":
        choose("kv_cache_dtype", "fp8_e4m3" if engine == "sglang" else "fp8_ds_mla", "the usual cache of these models")
    elif (
        engine == "vllm"
        and settings["kv_cache_dtype"] in FP8_OF_VLLM
        and settings["attention_backend"] == "flashmla-sparse"
    ):
        choose("kv_cache_dtype", "fp8_ds_mla", f"how FlashMLA sparse keeps {settings['kv_cache_dtype']}")
    if (transfer := settings.get("kv_transfer")) not in (None, *TRANSFERS_WITH_RULES):
        assumed.append(f"kv-transfer {transfer}: no rule is about it, only about {' and '.join(TRANSFERS_WITH_RULES)}")
    if settings.get("kv_transfer") == "nixl" and settings.get("dcp", 1) > 1:
        choose("interleave", settings["block_size"], "NIXL sets it to the block size")
    return Deployment(engine=engine, model=model, chip=chip, **settings), assumed


def _backend(engine: str, chip: Chip | None) -> str:
    if chip is not None and not chip.is_nvidia:
        return "rocm-aiter-mla-sparse" if engine == "vllm" else "tilelang"
    if engine == "sglang" and chip is not None and chip.is_blackwell:
        return "trtllm"
    return "flashmla-sparse"


def _block_size(engine: str, model: Model) -> tuple[int, str]:
    """Tokens of a block on one rank, and why so many."""
    if model.pool_ratios and engine == "sglang":
        return 64 * max(model.pool_ratios), "64 x index_kpool"
    if max(model.slot_ratios, default=1) > 64:
        return 256, "the usual block of compressed caches"
    return 64, "the usual block"
