"""Accelerators as sizes and costs see them: memory, peaks, links, latencies, each with its source.

chip("h200").hbm_bytes                          Figure(1.41e+11, "hardware", "ml-engineering ...")
chip("h200").latency_us["all_gather", 8]        Figure(12.19, "measured", "aiconfigurator NCCL ...")
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from cpkit.errors import ConfigError
from cpkit.sizing.figures import Figure

UNITS = {"tflops": 1e12, "tb_s": 1e12, "gb_s": 1e9}
"""What the unit in a fact's name stands for; GB and TB are decimal."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator. Bytes and flops are plain numbers, not GB or TFLOP; rates are per second.

    name: as the command line takes it; label: the vendor's; arch: sm_90, gfx942 and the like.
    peak_flops: dense, by dtype (bf16, fp8, fp4); a dtype that the chip lacks is absent.
    gpus_per_domain: GPUs that its link (NVLink, xGMI) joins. link_bytes: one GPU to all others of the domain, one
    direction; peer_bytes: one GPU to one other. network_bytes: one GPU out of its host, one direction.
    latency_us: of a collective that carries next to nothing, by (operation, ranks of one host); empty where none was
    measured. network_latency_us: one message between hosts.
    achieved: the best that was measured, by name: bf16_gemm and fp8_gemm in flops, hbm_copy, peer_copy_one_way and
    peer_copy_duplex in bytes.
    num_sms: None where it is not recorded.
    """

    name: str
    label: str
    arch: str
    hbm_bytes: Figure
    hbm_bandwidth: Figure
    peak_flops: Mapping[str, Figure] = field(hash=False)
    gpus_per_domain: Figure
    link_bytes: Figure
    peer_bytes: Figure
    network_bytes: Figure
    latency_us: Mapping[tuple[str, int], Figure] = field(hash=False)
    network_latency_us: Figure
    achieved: Mapping[str, Figure] = field(hash=False)
    num_sms: Figure | None

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
    small = entry.get("small_message_us", {"value": {}, "source": ""})
    return Chip(
        name=name.lower(),
        label=entry["name"],
        arch=entry["arch"],
        hbm_bytes=_figure(entry["hbm_capacity_gb"], 1e9),
        hbm_bandwidth=_figure(entry["hbm_bandwidth_tb_s"], 1e12),
        peak_flops={dtype: _figure(fact, 1e12) for dtype, fact in peaks if fact["value"] is not None},
        gpus_per_domain=_figure(link["gpus_per_domain"]),
        link_bytes=_figure(link["link_gb_s_per_direction"], 1e9),
        peer_bytes=_figure(link["peer_gb_s_per_direction"], 1e9),
        network_bytes=_figure(entry["nic_gb_s_per_direction"], 1e9),
        latency_us={
            (op, int(ranks)): Figure(us, "measured", small["source"])
            for op, by_ranks in small["value"].items()
            for ranks, us in by_ranks.items()
        },
        network_latency_us=_figure(facts["network_latency_us"]),
        achieved=dict(_achieved(name, fact) for name, fact in entry["achieved"].items()),
        num_sms=_figure(entry["sms"]) if "sms" in entry else None,
    )


def _achieved(name: str, fact: dict[str, Any]) -> tuple[str, Figure]:
    """bf16_gemm_tflops -> bf16_gemm, in flops."""
    unit = next(unit for unit in UNITS if f"_{unit}" in name)
    figure = Figure(fact["value"] * UNITS[unit], "measured", fact["source"])
    return name.replace(f"_{unit}", ""), figure


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
