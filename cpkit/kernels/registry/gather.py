"""Kernels of the caches and the key gather: which of them a deployment compiles, with which constants.

Pages may lie apart by any stride, so a kernel is compiled for each unit that such a stride is counted in (words.py).
Rows come as the package packs them. Few keys of each rank are not aligned in gathered shards, many are.
"""

import triton

from cpkit.kernels import fp8, gather_keys, index_cache, meet, paged_rows, table_keys
from cpkit.kernels.registry.entry import KernelEntry
from cpkit.kernels.registry.sizes import SAMPLES, KernelSizes
from cpkit.kernels.words import UNITS, WORD

FULL = {"bf16": 8, "fp16": 8, "fp32": 4}
"""Types of values that are quantized, and how many fill the 16 bytes a kernel reads at once."""


def gather_kernels() -> list[KernelEntry]:
    """The kernels of the sample deployments, each once."""
    entries = [entry for deployment in SAMPLES.values() for entry in cache_keys(deployment)]
    return list({entry.name: entry for entry in entries}.values())


def cache_keys(deployment: KernelSizes) -> list[KernelEntry]:
    """Every kernel that any rank of a deployment launches in any step."""
    entries = [entry for row in deployment.key_rows for entry in _rows(*row)]
    dim = deployment.index_dim
    if not dim:
        return entries
    entries += [*_rows(dim, index_cache.SCALE_BYTES), *_tables(deployment), *_quantizers(deployment)]
    if deployment.gathers_shards:
        entries += _collective(dim)
    elif deployment.dcp_size > 1 and deployment.pcp_size > 1:
        entries += _symmetric(deployment)
    return entries


def _numbers(narrow: str, wide: str) -> dict[str, str]:
    return dict.fromkeys(narrow.split(), "i32") | dict.fromkeys(wide.split(), "i64")


def _constants(sizes: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of a kernel, and its launch options."""
    return {name: size for name, size in sizes.items() if name != "num_warps"}, {"num_warps": sizes["num_warps"]}


_GATHERED = {"local_start": "*i32", "out_values": "*i32", "out_scales": "*i32"}
_GATHERED |= _numbers("num_keys keys_per_rank num_regions steps dcp_size interleave", "")


def _collective(dim: int) -> list[KernelEntry]:
    """Behind an all-gather: token order, and keys of a sample."""
    types = {"packed": "*i32", "positions": "*i32", **_GATHERED}
    sizes, options = _constants(gather_keys.row_sizes(dim))
    entries = []
    for picks, aligned in ((False, False), (False, True), (True, True)):
        name = f"{'pick' if picks else 'gather'}_keys-dim{dim}{'' if aligned else '-unaligned'}"
        constants = {"PICKS": picks, "ALIGNED": aligned, **sizes}
        entries.append(KernelEntry(name, gather_keys._gather_keys_kernel, types, constants, options))
    return entries


def _symmetric(deployment: KernelSizes) -> list[KernelEntry]:
    """A meeting, and token order out of the peers' buffers, or of their caches."""
    dim = deployment.index_dim
    sizes, options = _constants(gather_keys.row_sizes(dim))
    kernel, types = gather_keys._pull_keys_kernel, {"peers": "*i64", **_GATHERED}
    entries = [_meeting(deployment.dcp_size), KernelEntry(f"pull_keys-dim{dim}", kernel, types, sizes, options)]
    kernel, types = table_keys._pull_table_keys_kernel, {"peers": "*i64", **_table_types()}
    for unit in UNITS:
        name = f"pull_table_keys-dim{dim}-unit{unit}"
        entries.append(KernelEntry(name, kernel, types, {"UNIT": unit, **sizes}, options))
    return entries


def _meeting(num_ranks: int) -> KernelEntry:
    types = {"pads": "*i64", "own_pad": "*i32", "state": "*i32"} | _numbers("place size", "timeout_ns")
    constants, targets = {"RANKS": triton.next_power_of_2(num_ranks)}, ("sm_90", "sm_100")
    # its clock is an NVIDIA register
    return KernelEntry(f"meet-{constants['RANKS']}", meet._meet_kernel, types, constants, {"num_warps": 1}, targets)


def _tables(deployment: KernelSizes) -> list[KernelEntry]:
    """A rank's own keys through block tables."""
    dim, types = deployment.index_dim, {"cache": "*i32", **_table_types(), **_numbers("num_behind", "behind front")}
    sizes, options = _constants(gather_keys.row_sizes(dim))
    kernel = table_keys._table_keys_kernel
    return [KernelEntry(f"table_keys-dim{dim}-unit{u}", kernel, types, {"UNIT": u, **sizes}, options) for u in UNITS]


def _table_types() -> dict[str, str]:
    pointers = dict.fromkeys(("local_start", "block_tables", "key_lens", "out_values", "out_scales"), "*i32")
    counts = "num_keys num_rows steps dcp_size interleave block_size num_blocks width first_key"
    return pointers | _numbers(counts, "table_stride page_stride")


def _rows(main_bytes: int, side_bytes: int) -> list[KernelEntry]:
    """Rows of a cache, out of it and into it."""
    types = {"cache": "*i32", "rows": "*i32", "slots": "*i64"}
    types |= _numbers("", "num_rows num_blocks block_size page_stride row_stride")
    sizes, options = _constants(paged_rows.row_sizes(main_bytes, side_bytes))
    row_unit = next(unit for unit in UNITS if (main_bytes + side_bytes) % (unit * WORD) == 0)
    entries = []
    for unit in UNITS:
        for write in (0, 1):
            constants = {"PAGE_UNIT": unit, "ROW_UNIT": row_unit, "WRITE": write, **sizes}
            name = f"{'write' if write else 'read'}_rows-{main_bytes}-{side_bytes}-unit{unit}"
            entries.append(KernelEntry(name, paged_rows._move_rows_kernel, types, constants, options))
    return entries


def _quantizers(deployment: KernelSizes) -> list[KernelEntry]:
    """Index queries, and index keys on their way into the cache."""
    dim, pow2 = deployment.index_dim, deployment.pow2_scales
    sizes, options = _constants(fp8.group_sizes(dim, pow2))
    entries = []
    for dtype in deployment.index_dtypes:
        for unit in (FULL[dtype], 1) if dim % FULL[dtype] == 0 else (1,):
            label = f"dim{dim}-{dtype}-unit{unit}{'-pow2' if pow2 else ''}"
            types = {"values": f"*{dtype}", "quantized": "*fp8e4nv", "scales": "*fp32"}
            types |= _numbers("groups_a_token", "num_groups stride")
            constants = {"UNIT": unit, **sizes}
            entries.append(KernelEntry(f"quantize-{label}", fp8._quantize_kernel, types, constants, options))
            types = {"keys": f"*{dtype}", "slots": "*i64", "cache": "*fp8e4nv", "cache_scales": "*fp32"}
            types |= _numbers("", "num_keys num_blocks block_size key_stride page_stride")
            for page_unit in (16, index_cache.SCALE_BYTES):
                name = f"quantize_index_keys-{label}-page{page_unit}"
                paged = {"PAGE_UNIT": page_unit, **constants}
                entries.append(KernelEntry(name, index_cache._quantize_index_keys_kernel, types, paged, options))
    return entries
