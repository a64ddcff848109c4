"""Accelerators as sizes and costs see them: memory, peaks, links, each with its source.

chip("h200").hbm_bytes               Figure(1.41e+11, "hardware", "ml-engineering ...")
chip("h200").peak_flops["fp8"]       Figure(1.979e+15, "hardware", "ml-engineering ...")
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from cpkit.errors import ConfigError
from cpkit.sizing.figures import Figure


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator. Bytes and flops are plain numbers, not GB or TFLOP (decimal); rates are per second.

    name: as the command line takes it; label: the vendor's; arch: sm_90, gfx942 and the like.
    peak_flops: dense, by dtype (bf16, fp8, fp4); a dtype that the chip lacks is absent.
    gpus_per_domain: GPUs that its link (NVLink, xGMI) joins. link_bytes: one GPU to all others of the domain, one
    direction. network_bytes: one GPU out of its host, one direction. network_latency_us: one message between hosts.
    """

    name: str
    label: str
    arch: str
    hbm_bytes: Figure
    hbm_bandwidth: Figure
    peak_flops: Mapping[str, Figure] = field(hash=False)
    gpus_per_domain: Figure
    link_bytes: Figure
    network_bytes: Figure
    network_latency_us: Figure

    @property
    def is_nvidia(self) -> bool:
        """A CUDA chip."""
        return self.arch.startswith("sm_")

    @property
    def is_hopper(self) -> bool:
        """Compute capability 9."""
        return self.arch == "sm_90"

    @property
    def is_blackwell(self) -> bool:
        """A datacenter Blackwell, compute capability 10."""
        return self.arch.startswith("sm_10")


def chip_names() -> list[str]:
    """The chips that are known."""
    return list(_facts()["chips"])


@cache
def chip(name: str) -> Chip:
    """A chip by name, upper or lower case; raises ConfigError with the names there are."""
    facts = _facts()
    entry = facts["chips"].get(name.lower())
    if entry is None:
        raise ConfigError(f"unknown chip {name!r}: use one of {', '.join(chip_names())}")
    link = entry["link"]
    peaks = entry["dense_tflops"].items()
    return Chip(
        name=name.lower(),
        label=entry["name"],
        arch=entry["arch"],
        hbm_bytes=_figure(entry["hbm_capacity_gb"], 1e9),
        hbm_bandwidth=_figure(entry["hbm_bandwidth_tb_s"], 1e12),
        peak_flops={dtype: _figure(fact, 1e12) for dtype, fact in peaks if fact["value"] is not None},
        gpus_per_domain=_figure(link["gpus_per_domain"]),
        link_bytes=_figure(link["link_gb_s_per_direction"], 1e9),
        network_bytes=_figure(entry["nic_gb_s_per_direction"], 1e9),
        network_latency_us=_figure(facts["network_latency_us"]),
    )


def _figure(fact: dict[str, Any], scale: float = 1) -> Figure:
    """A fact of the file; one of low certainty, and what its note says, are told in the source."""
    doubt = "; low certainty" if fact.get("certainty") == "low" else ""
    note = f"; {fact['note']}" if "note" in fact else ""
    return Figure(fact["value"] * scale, "hardware", f"{fact['source']}{doubt}{note}")


@cache
def _facts() -> dict[str, Any]:
    text = (resources.files("cpkit") / "data" / "chips.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts
