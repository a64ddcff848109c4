"""The exchange of candidates between DCP ranks: packing, joining key spans, and the best of all ranks.

How the best are found depends on how many candidates a thread holds: 8 or 32 here, and 16 where key spans are joined.
"""

import triton

from cpkit.kernels import exchange_candidates as exchange
from cpkit.kernels.candidates import token_order
from cpkit.kernels.registry.entry import KernelEntry
from cpkit.kernels.registry.sizes import KernelSizes
from cpkit.kernels.topk import TOPK

BEST_SIZES = ((2, 512), (8, 2048))
"""Ranks, and candidates of a rank."""


def exchange_entries() -> list[KernelEntry]:
    """One entry for each kernel and each kind of constants that the wrappers launch."""
    entries = [_packing(k, 8, 1, scored=scored) for k in TOPK for scored in (False, True)]
    entries.append(_best_entry("join_packed-k2048", 2, 2048, packed=1))
    return entries + [_best_entry(f"best_of_packed-k{k}-dcp{ranks}", ranks, k, packed=0) for ranks, k in BEST_SIZES]


def exchange_keys(deployment: KernelSizes) -> list[KernelEntry]:
    """Every kernel that any rank of a deployment launches in any step."""
    k, dcp_size, gathered = deployment.index_topk, deployment.dcp_size, token_order(0)
    shards = sorted({(dcp_size, max(deployment.interleave // ratio, 1)) for ratio in deployment.ratios()})
    prefills = [(gathered.dcp_size, gathered.interleave)] if deployment.pcp_size > 1 and dcp_size > 1 else shards
    entries = [_packing(k, *order, scored=False) for order in shards]  # decodes
    entries += [_packing(k, *order, scored=True) for order in prefills]
    at_once = exchange.lists_at_once(k)
    entries.append(_best_entry(f"join_packed-k{k}", at_once, k, packed=1))
    if dcp_size > 1:
        lists = dcp_size
        while lists * k > exchange.MOST_AT_ONCE:
            lists = triton.cdiv(lists, at_once)
        entries.append(_best_entry(f"best_of_packed-k{k}-lists{lists}", lists, k, packed=0))
    return entries


def _packing(k: int, dcp_size: int, interleave: int, *, scored: bool) -> KernelEntry:
    counts = dict.fromkeys(("num_tokens", "num_keys", "topk_stride", "logits_stride", "dcp_rank", "first_key"), "i64")
    types = {"topk_indices": "*i32", "logits": "*fp32", "key_start": "*i32", "out": "*i32", **counts}
    constants = {"SCORED": scored, "K": k, "DCP_SIZE": dcp_size, "INTERLEAVE": interleave, "BLOCK": exchange.BLOCK}
    name = f"packed_{'scores' if scored else 'candidates'}-k{k}-dcp{dcp_size}-interleave{interleave}"
    return KernelEntry(name, exchange._packed_candidates_kernel, types, constants, {"num_warps": 4})


def _best_entry(name: str, num_lists: int, k: int, *, packed: int) -> KernelEntry:
    types = {"gathered": "*i32", "scores": "*i32" if packed else "*fp32", "positions": "*i32" if packed else "*i64"}
    types |= {"packed": "*i32" if packed else "*fp32", "num_tokens": "i64", "num_lists": "i64"}
    sizes, warps = exchange.best_sizes(num_lists, k)
    spill = 1024 if num_lists * k == exchange.MOST_AT_ONCE else 256  # one order a candidate is all that must stay
    kernel, constants = exchange._best_of_packed_kernel, {**sizes, "K": k, "PACKED": packed}
    return KernelEntry(name, kernel, types, constants, {"num_warps": warps}, spill_bytes=spill)
