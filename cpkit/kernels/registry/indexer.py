"""Indexer kernels: logits for 32 and 64 heads, portable and Hopper, and top-k for every k.

A GPU launches some of them: Hopper the logits of its own, other GPUs the portable ones; top-k is compiled by Triton
where topk.cu, which is no kernel of this list, does not run.
"""

from cpkit.kernels import mqa_logits, topk
from cpkit.kernels import mqa_logits_gluon as hopper
from cpkit.kernels.gpu_kind import GpuKind
from cpkit.kernels.mqa_items_gluon import TILE
from cpkit.kernels.registry.entry import KernelEntry, descriptor
from cpkit.kernels.registry.exchange import exchange_keys
from cpkit.kernels.registry.paged_logits import paged_logits_keys
from cpkit.kernels.registry.sizes import KernelSizes


def indexer_kernels() -> list[KernelEntry]:
    """One entry for each kernel and each set of constants that the wrappers launch."""
    entries = [entry for H in mqa_logits.NUM_HEADS for entry in (*_portable_logits(H), *_hopper_logits(H))]
    return [*entries, *map(_topk, topk.TOPK)]


def indexer_keys(deployment: KernelSizes, gpu: GpuKind) -> list[KernelEntry]:
    """Every kernel that the indexer of a deployment launches on a kind of GPU in any step, its exchange included."""
    H = deployment.index_heads
    if not H:
        return []
    entries = _hopper_logits(H) if gpu == "hopper" else _portable_logits(H)
    turns = [max(deployment.interleave // ratio, 1) for ratio in deployment.ratios()]
    whole_tiles = gpu != "hopper" or any(turn % TILE == 0 for turn in turns)
    if not (deployment.gathers_shards and whole_tiles):
        entries = [entry for entry in entries if not entry.constants.get("SHARDS")]
    if gpu == "other":
        entries.append(_topk(deployment.index_topk))
    return [*entries, *paged_logits_keys(deployment, gpu), *exchange_keys(deployment)]


def _portable_logits(H: int) -> list[KernelEntry]:
    """Of keys side by side, and of shards."""
    types = {"q": "*fp8e4nv", "k": "*fp8e4nv", "out": "*fp32", **_common()}
    types |= {"q_units": "i64", "k_units": "i64", "out_stride": "i64", "local_start": "*i32"}
    types |= dict.fromkeys(("num_regions", "steps", "dcp_size", "interleave", "keys_per_rank"), "i32")
    kernel, entries = mqa_logits._mqa_logits_kernel, []
    for shards in (False, True):
        name = f"mqa_logits-H{H}{'-shards' if shards else ''}"
        sizes = {"SHARDS": shards, "H": H, **mqa_logits.mqa_logits_sizes(H)}
        entries.append(KernelEntry(name, kernel, types, sizes, {"num_warps": 8}))
    return entries


def _hopper_logits(H: int) -> list[KernelEntry]:
    """Logits of all rows, and of those that a list names; and the same kernel where it lists those that pass a bound.
    Of keys side by side, and of shards. wgmma is an instruction of sm_90 alone.
    """
    tiles = {"k_desc": descriptor("fp8e4nv", (64, 128)), **_common(), "num_items": "i32", "chunk_keys": "i32"}
    tiles |= {"local_start": "*i32"}
    tiles |= dict.fromkeys(("num_regions", "steps", "dcp_size", "interleave", "keys_per_rank"), "i32")
    written = {"out": "*fp32", "out_stride": "i64", "open_rows": "*i32", "first_open": "i32"}
    lists = {"bound_score": "*fp32", "bound_key": "*i32", "survivors": "*i64", "counts": "*i32", "room": "i32"}
    options, targets, entries = {"num_warps": 4, "maxnreg": 168}, ("sm_90",), []
    for shards, label in ((False, ""), (True, "-shards")):
        tiles["s_desc"] = descriptor("fp32", (1, 64), swizzle=0) if shards else tiles["k_desc"]
        for listed, box in ((False, 128), (True, H)):
            types = {"q_desc": descriptor("fp8e4nv", (box, 128)), **tiles, **written}
            sizes = {"H": H, "OPEN": listed, "SHARDS": shards}
            name, kernel = f"mqa_logits_hopper-H{H}{label}{'-open' if listed else ''}", hopper._mqa_logits_hopper_kernel
            spill = 64 if shards and listed else 0  # where items begin
            entries.append(KernelEntry(name, kernel, types, sizes, options, targets, spill_bytes=spill))
        types = {"q_desc": descriptor("fp8e4nv", (128, 128)), **tiles, **lists}
        name, kernel = f"mqa_survivors_hopper-H{H}{label}", hopper._mqa_survivors_hopper_kernel
        sizes = {"H": H, "SHARDS": shards}
        spill = 64  # where runs of tiles begin
        entries.append(KernelEntry(name, kernel, types, sizes, options, targets, spill_bytes=spill))
    return entries


def _common() -> dict[str, str]:
    types = {"k_scale": "*fp32", "weights": "*fp32", "key_start": "*i32", "key_end": "*i32"}
    return types | {"M": "i32", "N": "i32", "w_units": "i64"}


def _topk(k: int) -> KernelEntry:
    types = {"logits": "*fp32", "key_start": "*i32", "key_end": "*i32", "out": "*i32", "N": "i32"}
    types |= {"row_stride": "i64", "out_stride": "i64"}
    sizes, options = {"K": k, "BLOCK": topk.BLOCK}, {"num_warps": topk.NUM_WARPS}
    return KernelEntry(f"topk-k{k}", topk._topk_kernel, types, sizes, options, spill_bytes=128)
