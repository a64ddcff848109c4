"""Heads under DCP: those of the ranks that share shards come together, and each rank gets its own ones back, merged.

    pcp = 1            gather over dcp     merge over dcp: each rank keeps its own heads
    dcp = pcp          (same heads)        merge over dcp: each rank keeps 1/dcp of its heads, then gather over pcp
    dcp = tp * pcp     gather over tp      merge over dcp: each rank keeps 1/dcp of all heads, then gather over pcp

With pcp > 1 a rank keeps the pcp_rank-th part of its own heads either way, since a DCP group runs over PCP first.
"""

import torch

from cpkit.comm.base import Comm
from cpkit.kernels.merge_lse import apply_sink
from cpkit.merge import gather_heads, merge_shards
from cpkit.topology import Topology
from cpkit.worker.attend import Partial


def gather_query_heads(comm: Comm, q: torch.Tensor) -> torch.Tensor:
    """[rows, own heads, dim] bf16 -> [rows, heads of the DCP group, dim], in head order."""
    topology = comm.topology
    if topology.pcp > 1 and topology.dcp == topology.pcp:
        return q
    group = "dcp" if topology.pcp == 1 else "tp"
    gathered = comm.all_gather(q.contiguous(), group, what="query_heads")
    return gathered.view(-1, *q.shape).transpose(0, 1).flatten(1, 2)


def own_merged_heads(topology: Topology, rank: int, num_heads: int) -> slice:
    """Which of its num_heads own heads a rank merges itself over DCP, so that it has their LSE."""
    share, place = num_heads // topology.pcp, topology.coords(rank).pcp
    return slice(place * share, (place + 1) * share)


def merge_heads(comm: Comm, partial: Partial, sink: torch.Tensor | None, merge: str) -> Partial:
    """Partials over the shards, [rows, gathered heads, ...] -> whole outputs of the own heads, the sink taken off once.

    merge: ag_rs or a2a. sink: [own heads] fp32 or None. With pcp > 1 the LSE stays with the rank that merged a head:
    elsewhere it is NaN.
    """
    out, merged_lse = merge_shards(comm, *partial, merge=merge)
    num_heads = out.shape[1] * comm.topology.pcp
    merged = own_merged_heads(comm.topology, comm.rank, num_heads)
    if sink is not None:
        out = apply_sink(out, merged_lse, sink[merged])
    if comm.topology.pcp == 1:
        return out, merged_lse
    lse = merged_lse.new_full((len(out), num_heads), float("nan"))
    lse[:, merged] = merged_lse
    return gather_heads(comm, out), lse
