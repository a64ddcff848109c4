"""Indexer kernels: logits for 32 and 64 heads, portable and Hopper, and top-k for every k."""

from cpkit.kernels import mqa_logits, topk
from cpkit.kernels import mqa_logits_gluon as hopper
from cpkit.kernels.registry.entry import KernelEntry

_TILE = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2, transposed=False, fp4_padded=False, "
    "cga_layout=[])"
)


def indexer_kernels() -> list[KernelEntry]:
    """One entry for each kernel and each set of constants that the wrappers launch."""
    return [*_logits_entries(), *_topk_entries()]


def _logits_entries() -> list[KernelEntry]:
    common = {"k_scale": "*fp32", "weights": "*fp32", "key_start": "*i32", "key_end": "*i32", "out": "*fp32"}
    common |= {"M": "i32", "N": "i32", "w_stride": "i64", "out_stride": "i64"}
    portable = {"q": "*fp8e4nv", "k": "*fp8e4nv", "q_stride": "i64", "k_stride": "i64", **common}
    tma = {"q_desc": f"tensordesc<fp8e4nv[128,128],{_TILE}>", "k_desc": f"tensordesc<fp8e4nv[64,128],{_TILE}>"}
    tma |= {**common, "num_items": "i32", "chunk_keys": "i32"}
    tma |= {"bound_score": "*fp32", "bound_key": "*i32", "survivors": "*i64", "counts": "*i32", "room": "i32"}
    entries = []
    for H in mqa_logits.NUM_HEADS:
        sizes = {"H": H, **mqa_logits.mqa_logits_sizes(H)}
        kernel = mqa_logits._mqa_logits_kernel
        entries.append(KernelEntry(f"mqa_logits-H{H}", kernel, portable, sizes, {"num_warps": 8}))
        kernel, options = hopper._mqa_logits_hopper_kernel, {"num_warps": 4, "maxnreg": 168}
        # wgmma is an instruction of sm_90 alone
        entries.append(KernelEntry(f"mqa_logits_hopper-H{H}", kernel, tma, {"H": H}, options, ("sm_90",)))
        kernel = hopper._mqa_survivors_hopper_kernel
        # outside the loop over keys, and under triton 3.6 alone
        entries.append(
            KernelEntry(f"mqa_survivors_hopper-H{H}", kernel, tma, {"H": H}, options, ("sm_90",), spill_bytes=96)
        )
    return entries


def _topk_entries() -> list[KernelEntry]:
    types = {"logits": "*fp32", "key_start": "*i32", "key_end": "*i32", "out": "*i32", "N": "i32"}
    types |= {"row_stride": "i64", "out_stride": "i64"}
    options = {"num_warps": topk.NUM_WARPS}
    kernel, sizes = topk._topk_kernel, {"BLOCK": topk.BLOCK}
    return [KernelEntry(f"topk-k{k}", kernel, types, {"K": k, **sizes}, options, spill_bytes=128) for k in topk.TOPK]
