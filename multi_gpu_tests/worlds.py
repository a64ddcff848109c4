"""Worlds of as many ranks as the job has."""

from cpkit.topology import Topology, legal_dcp_sizes


def worlds(size):
    """Every (tp, pcp, dcp) of `size` ranks."""
    return [
        {"tp": tp, "pcp": size // tp, "dcp": dcp}
        for tp in range(1, size + 1)
        if size % tp == 0
        for dcp in legal_dcp_sizes(tp, size // tp)
    ]


def one_dcp_group(size, tp=1):
    """A world of `size` ranks that all share each other's keys."""
    return Topology(tp=tp, pcp=size // tp, dcp=size)
