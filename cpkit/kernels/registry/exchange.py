"""The exchange of candidates between DCP ranks: packing, and the best of all ranks at the sizes of 2 to 8 ranks."""

from cpkit.kernels import exchange_candidates as exchange
from cpkit.kernels.registry.entry import KernelEntry
from cpkit.kernels.topk import TOPK


def exchange_entries() -> list[KernelEntry]:
    """One entry for each kernel and each set of constants that the wrappers launch."""
    counts = dict.fromkeys(("num_tokens", "num_keys", "topk_stride", "logits_stride", "dcp_rank", "first_key"), "i64")
    rows = {"topk_indices": "*i32", "logits": "*fp32", "key_start": "*i32", "out": "*i32", **counts}
    lists = {"gathered": "*i32", "scores": "*fp32", "positions": "*i64", "packed": "*i32"}
    lists |= {"num_tokens": "i64", "num_lists": "i64"}
    entries = []
    for k in TOPK:
        sizes = {"K": k, "DCP_SIZE": 8, "INTERLEAVE": 1, "BLOCK": exchange.BLOCK}
        kernel = exchange._packed_candidates_kernel
        entries.append(KernelEntry(f"packed_candidates-k{k}", kernel, rows, sizes, {"num_warps": 4}))
        for ranks in (2, 4, 8):
            sizes, warps = exchange.best_sizes(ranks, k)
            constants = {**sizes, "K": k, "PACKED": 0}
            spill = 1024 if ranks * k == exchange.MOST_AT_ONCE else 256  # one order a candidate is all that must stay
            kernel, options = exchange._best_of_packed_kernel, {"num_warps": warps}
            entries.append(
                KernelEntry(f"best_of_packed-k{k}-dcp{ranks}", kernel, lists, constants, options, spill_bytes=spill)
            )
    return entries
