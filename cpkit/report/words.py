"""A world and its choices in the words that every report uses."""

from cpkit.topology import Topology


def sizes_text(topology: Topology) -> str:
    """Sizes of the parallel axes; dp and pp only where they are used.  tp=4 pcp=2 dcp=8"""
    outer = [axis for axis in ("dp", "pp") if getattr(topology, axis) > 1]
    return " ".join(f"{axis}={getattr(topology, axis)}" for axis in (*outer, "tp", "pcp", "dcp"))


def partition_text(strategy: str, topology: Topology) -> str:
    """How prefills are split, spelled as the command line takes it.  head-tail"""
    return strategy.replace("_", "-") if topology.pcp > 1 else "none (pcp=1)"


def merge_text(merge: str, topology: Topology) -> str:
    """How partial outputs are merged.  ag_rs"""
    return merge if topology.dcp > 1 else "none (dcp=1)"


def stages_text(topology: Topology) -> str:
    """What to say behind figures that a rank has only its stage's share of."""
    return f", all {topology.pp} pipeline stages" if topology.pp > 1 else ""
