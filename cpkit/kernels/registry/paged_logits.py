"""Decode logits over pages, portable and Hopper: for every number of query tokens that share a reading of a page.

Ahead of time with 64 heads for 1, 2 and 4 query tokens a row, with 32 for fewest and most: 32 heads with 2 or 4 are as
many columns as 64 with 1 or 2, and are summed as with 1 or 8.
"""

from cpkit.kernels import paged_mqa_logits as portable
from cpkit.kernels import paged_mqa_logits_gluon as hopper
from cpkit.kernels.gpu_kind import GpuKind
from cpkit.kernels.paged_mqa_loader_gluon import product_columns
from cpkit.kernels.registry.entry import KernelEntry, descriptor
from cpkit.kernels.registry.sizes import KernelSizes

SIZES = ((32, 1), (32, 8), (64, 1), (64, 2), (64, 4))
"""Index heads, and query tokens of a row."""


def paged_logits_entries() -> list[KernelEntry]:
    """One entry for each kernel and each kind of constants that the wrapper launches."""
    return [entry for size in SIZES for entry in (*_portable(*size), _hopper(*size))]


def paged_logits_keys(deployment: KernelSizes, gpu: GpuKind) -> list[KernelEntry]:
    """Every kernel that decode rows of up to so many query tokens launch on a kind of GPU."""
    H = deployment.index_heads
    shared = {hopper.tokens_at_once(H, tokens + 1) for tokens in range(deployment.query_tokens)}
    if gpu == "hopper":
        return [_hopper(H, tokens) for tokens in sorted(shared)]
    return [entry for tokens in sorted(shared) for entry in _portable(H, tokens)]


def _common() -> dict[str, str]:
    pointers = {"seq_lens": "*i32", "block_tables": "*i32", "schedule": "*i32", "out": "*fp32"}
    return {**pointers, "num_tokens": "i32", "max_keys": "i32", "table_stride": "i64", "out_stride": "i64"}


def _portable(H: int, tokens: int) -> list[KernelEntry]:
    """One for each unit of distances between pages."""
    types = {"q": "*fp8e4nv", "cache": "*u8", "weights": "*fp32", **_common()}
    types |= {"num_blocks": "i32", "page_stride": "i64"}
    kernel, sizes = portable._paged_mqa_logits_kernel, {"H": H, **portable.paged_mqa_logits_sizes(H, tokens)}
    spill = 320 if tokens * H == portable.COLUMNS else 0  # sm_100: its accumulators are 256 columns wide
    entries = []
    for unit in portable.PAGE_UNITS:
        name, constants = f"paged_mqa_logits-H{H}-n{tokens}-page{unit}", {**sizes, "PAGE_UNIT": unit}
        entries.append(KernelEntry(name, kernel, types, constants, {"num_warps": 4}, spill_bytes=spill))
    return entries


def _hopper(H: int, tokens: int) -> KernelEntry:
    """wgmma is an instruction of sm_90 alone."""
    columns = product_columns(tokens, H)
    types = {
        "q_desc": descriptor("fp8e4nv", (columns, 128)),
        "w_desc": descriptor("fp32", (columns // 32, 32), swizzle=0),
        "k_desc": descriptor("fp8e4nv", (64, 128)),
        "s_desc": descriptor("fp32", (2, 32), swizzle=0),
        **_common(),
        "page_lines": "i32",
        "num_blocks": "i32",
    }
    share = hopper.scorers(H, tokens)
    constants = {"H": H, "TOKENS": tokens, "SCORERS": share["SCORERS"]}
    options = {"num_warps": 4, "maxnreg": share["maxnreg"]}
    kernel, name = hopper._paged_mqa_logits_hopper_kernel, f"paged_mqa_logits_hopper-H{H}-n{tokens}"
    return KernelEntry(name, kernel, types, constants, options, ("sm_90",))
