"""Worlds of as many ranks as the job has."""

from cpkit.topology import legal_dcp_sizes


def worlds(size):
    """Every (tp, pcp, dcp) of `size` ranks."""
    return [
        {"tp": tp, "pcp": size // tp, "dcp": dcp}
        for tp in range(1, size + 1)
        if size % tp == 0
        for dcp in legal_dcp_sizes(tp, size // tp)
    ]
