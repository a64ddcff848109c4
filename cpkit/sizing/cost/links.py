"""Seconds of a collective on a chip's links: measured tables inside a host, latency and bandwidth beyond.

    one host      the measured time of that many ranks; another number of ranks is scaled from the nearest measured one
    no table      latency of a small message + what a rank receives / (link x LINK_SHARE)
    more hosts    the longer of the part inside a host and the part over the network, and a message's latency for each
                  doubling of the hosts

A whole buffer is what an all-gather returns, and what one rank puts into another operation.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property

from cpkit.sizing.chips import Chip
from cpkit.sizing.cost.tables import Curve, collective_curves
from cpkit.sizing.figures import Figure
from cpkit.topology import Topology

LINK_SHARE = 0.8
"""Share of a link's peak that a large collective reaches, where nothing was measured: the usual expectation."""

SMALL_MESSAGE_S = 10e-6
"""A collective that carries next to nothing, where nothing was measured: assumed; NVIDIA's chips take 5 to 16 us."""

PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
"""Times that the whole buffer passes a rank's link."""

NCCL = "NCCL 2.29.2 (aiconfigurator-core 0.12.0)"


@dataclass(frozen=True, slots=True)
class Span:
    """Where a group's ranks sit: num_ranks in all, on num_hosts domains of the link."""

    num_ranks: int
    num_hosts: int


@dataclass(frozen=True)
class Links:
    """The links of a world of one chip; ranks fill a domain (NVLink, xGMI) before the next one."""

    chip: Chip
    topology: Topology

    @cached_property
    def spans(self) -> dict[str, Span]:
        """Span of the first group of each kind that a step uses; ranks of other groups lie likewise."""
        domain = int(self.chip.gpus_per_domain.value)
        found = {}
        for name in ("pcp", "tp", "dcp"):
            group = self.topology.groups(name)[0]
            found[name] = Span(len(group), len({rank // domain for rank in group}))
        return found

    def seconds(self, op: str, group: str, sent: float) -> Figure:
        """Time of one collective; sent: bytes that each rank puts in."""
        span = self.spans[group]
        whole = sent * span.num_ranks if op == "all_gather" else sent
        return collective_seconds(self.chip, op, span, whole)


def collective_seconds(chip: Chip, op: str, span: Span, whole: float) -> Figure:
    """Time of one collective over a span; whole: bytes of the whole buffer. One rank alone takes none."""
    if span.num_ranks == 1 or not whole:
        return Figure(0.0, "counted", "nothing travels")
    per_host = math.ceil(span.num_ranks / span.num_hosts)
    inside = _inside(chip, op, per_host, whole)
    if span.num_hosts == 1:
        return inside
    share_out = (span.num_hosts - 1) / span.num_hosts
    senders = 1 if op == "all_to_all" else per_host  # an all-to-all's bytes are a rank's own, others' are shared out
    network = PASSES[op] * whole * share_out / senders / (chip.network_bytes.value * LINK_SHARE)
    latency = 1e-6 * chip.network_latency_us.value * math.ceil(math.log2(span.num_hosts))
    seconds = max(inside.value, network) + latency
    return Figure(seconds, "hardware", f"network of {chip.name}, {LINK_SHARE:g} of its peak, and its latency")


def _inside(chip: Chip, op: str, num_ranks: int, whole: float) -> Figure:
    """Time among the ranks of one host."""
    if num_ranks == 1:
        return Figure(0.0, "counted", "nothing travels inside a host")
    found = _nearest(chip.name, op, num_ranks)
    if found is None:
        received = PASSES[op] * whole * (num_ranks - 1) / num_ranks
        transfer = received / (chip.link_bytes.value * LINK_SHARE)
        kind = "hardware" if transfer > SMALL_MESSAGE_S else "assumed"  # by the larger part
        source = f"link of {chip.name}, {LINK_SHARE:g} of its peak, and an assumed {1e6 * SMALL_MESSAGE_S:g} us"
        return Figure(SMALL_MESSAGE_S + transfer, kind, source)
    near, curve = found
    seconds, inside = _read(curve, whole)
    if near == num_ranks and inside:
        return Figure(seconds, "measured", NCCL)
    seconds *= (num_ranks - 1) / num_ranks / ((near - 1) / near)
    seconds += curve.seconds[0] * max(0.0, math.log2(num_ranks / near))
    return Figure(seconds, "calibrated", f"{NCCL}, scaled from its nearest point")


@cache
def _nearest(chip_name: str, op: str, num_ranks: int) -> tuple[int, Curve] | None:
    """The measured number of ranks nearest to one, and its times; None where nothing was measured."""
    curves = collective_curves(chip_name)
    sizes = [ranks for name, ranks in curves if name == op]
    if not sizes:
        return None
    near = min(sizes, key=lambda ranks: (abs(ranks - num_ranks), -ranks))
    return near, curves[op, near]


def _read(curve: Curve, whole: float) -> tuple[float, bool]:
    """Seconds, and whether the size lies in the table: below its smallest it is latency, above its largest the rate."""
    seconds, at = curve.read(whole)
    return seconds * max(whole / at, 1.0), at == whole
