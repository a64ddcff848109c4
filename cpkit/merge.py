"""How the ranks of a DCP group turn partial outputs over their shards into whole outputs of some heads each.

4 heads, 2 ranks; every rank attended its own keys with all 4 heads:

    rank 0 puts in   h0 h1 h2 h3 over its keys        gets   h0 h1 over all keys
    rank 1           h0 h1 h2 h3 over its keys               h2 h3

    ag_rs    all-gather of the LSEs; each rank weighs its outputs; reduce-scatter adds them up, head by head
    a2a      one exchange of outputs and LSEs packed side by side; each rank merges what it got of its heads

Both give the same up to rounding. Every rank of the group calls with the same sizes; tokens may be 0.
"""

import torch

from cpkit.comm.base import Comm
from cpkit.errors import ConfigError
from cpkit.kernels.checks import check_tensor
from cpkit.kernels.merge_lse import lse_weights, merge_lse, weigh_output
from cpkit.planner.collectives import MERGES


def merge_shards(
    comm: Comm, out: torch.Tensor, lse: torch.Tensor, *, merge: str, base: str = "e"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [num_tokens, H / dcp, V] and LSEs [num_tokens, H / dcp] over all shards, of this rank's merged_heads.

    out: [num_tokens, H, V] fp32 and lse: [num_tokens, H] fp32 over this rank's keys. merge: ag_rs or a2a.
    base: of the LSEs, e or 2. Raises ConfigError for another merge, or heads that do not divide over the group.
    """
    check_tensor("out", out, torch.float32, (None, None, None), comm.device)
    check_tensor("lse", lse, torch.float32, tuple(out.shape[:2]), comm.device)
    heads = merged_heads(comm, out.shape[1])
    if merge == "ag_rs":
        return _gather_and_reduce(comm, out, lse, heads, base)
    if merge == "a2a":
        return _exchange(comm, out, lse, base)
    raise ConfigError(f"merge {merge!r}: use one of {', '.join(MERGES)}")


def merged_heads(comm: Comm, num_heads: int) -> slice:
    """Which of the heads that the group attends with this rank holds after merging."""
    group = comm.group("dcp")
    share, rest = divmod(num_heads, group.size)
    if rest:
        raise ConfigError(f"{num_heads} heads do not divide over {group}: merging leaves each rank an equal share")
    return slice(group.place * share, (group.place + 1) * share)


def gather_heads(comm: Comm, out: torch.Tensor) -> torch.Tensor:
    """[num_tokens, H, V] -> [num_tokens, pcp * H, V]: the heads that the PCP ranks of this rank's TP place merged.

    The order of the DCP group makes them land in order: with tp=2, pcp=2, dcp=4 it is 0, 2, 1, 3, so that ranks 0 and 2
    (TP place 0) hold the first and second quarter of the heads.
    """
    return _tokens_first(comm.all_gather(_heads_first(out), "pcp", what="output_heads"))


def _gather_and_reduce(
    comm: Comm, out: torch.Tensor, lse: torch.Tensor, heads: slice, base: str
) -> tuple[torch.Tensor, torch.Tensor]:
    group = comm.group("dcp")
    lses = comm.all_gather(lse.contiguous(), "dcp", what="lse").view(group.size, *lse.shape)
    weights, merged = lse_weights(lses, base=base)
    share = _heads_first(weigh_output(out, lse, weights[group.place]))
    return _tokens_first(comm.reduce_scatter(share, "dcp", what="outputs")), merged[:, heads].contiguous()


def _exchange(comm: Comm, out: torch.Tensor, lse: torch.Tensor, base: str) -> tuple[torch.Tensor, torch.Tensor]:
    packed = _heads_first(torch.cat([out, lse[..., None]], dim=2))
    received = comm.all_to_all(packed, "dcp", what="partials")
    size = comm.group("dcp").size
    # [dcp, num_tokens, H / dcp, V + 1]
    partials = received.view(size, len(packed) // size, *packed.shape[1:]).transpose(1, 2)
    return merge_lse(partials[..., :-1], partials[..., -1].contiguous(), base=base)


def _heads_first(out: torch.Tensor) -> torch.Tensor:
    """Collectives cut dim 0, and it is heads that are dealt out."""
    return out.transpose(0, 1).contiguous()


def _tokens_first(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(0, 1).contiguous()
