"""Decode logits over pages, portable and Hopper: 64 heads with 1, 2 and 4 query tokens a row, 32 with fewest and most.

32 heads with 2 or 4 query tokens are as many columns as 64 with 1 or 2, and are summed as with 1 or 8.
"""

from cpkit.kernels import paged_mqa_logits as portable
from cpkit.kernels import paged_mqa_logits_gluon as hopper
from cpkit.kernels.registry.entry import KernelEntry

SIZES = ((32, 1), (32, 8), (64, 1), (64, 2), (64, 4))
"""Index heads, and query tokens of a row."""


def paged_logits_entries() -> list[KernelEntry]:
    """One entry for each kernel and each kind of constants that the wrapper launches."""
    ints = {"seq_lens": "*i32", "block_tables": "*i32", "schedule": "*i32"}
    common = {"weights": "*fp32", **ints, "out": "*fp32", "num_tokens": "i32", "max_keys": "i32"}
    common |= {"table_stride": "i64", "out_stride": "i64"}
    pages = {"q": "*fp8e4nv", "cache": "*u8", **common, "num_blocks": "i32", "page_bytes": "i64"}
    entries = []
    for H, tokens in SIZES:
        name = f"H{H}-n{tokens}"
        sizes = {"H": H, **portable.paged_mqa_logits_sizes(H, tokens)}
        kernel = portable._paged_mqa_logits_kernel
        spill = 320 if tokens * H == portable.COLUMNS else 0  # sm_100: its accumulators are 256 columns wide
        entries.append(
            KernelEntry(f"paged_mqa_logits-{name}", kernel, pages, sizes, {"num_warps": 4}, spill_bytes=spill)
        )
        lines = {**_descriptors(min(tokens * H, 128)), **common, "page_lines": "i32"}
        share = hopper.scorers(H, tokens)
        sizes = {"H": H, "TOKENS": tokens, "SCORERS": share["SCORERS"]}
        options = {"num_warps": 4, "maxnreg": share["maxnreg"]}
        kernel = hopper._paged_mqa_logits_hopper_kernel
        # wgmma is an instruction of sm_90 alone
        entries.append(KernelEntry(f"paged_mqa_logits_hopper-{name}", kernel, lines, sizes, options, ("sm_90",), 16))
    return entries


def _descriptors(columns: int) -> dict[str, str]:
    def layout(swizzle: int, bits: int) -> str:
        return (
            f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank=2, transposed=False, "
            "fp4_padded=False, cga_layout=[])"
        )

    return {
        "q_desc": f"tensordesc<fp8e4nv[{columns},128],{layout(128, 8)}>",
        "k_desc": f"tensordesc<fp8e4nv[64,128],{layout(128, 8)}>",
        "s_desc": f"tensordesc<fp32[2,32],{layout(0, 32)}>",
    }
