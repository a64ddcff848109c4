"""Kernels of the caches and the key gather: each for the rows of the models, aligned to 16 bytes and not."""

from cpkit.kernels import fp8, gather_keys, index_cache, meet, paged_rows, table_keys
from cpkit.kernels.latent_cache import V4_MAIN_BYTES, V4_SIDE_BYTES, V32_BYTES
from cpkit.kernels.registry.entry import KernelEntry

INDEX_DIM = 128
VALUE_TYPES = {"bf16": 8, "fp16": 8, "fp32": 4}
"""Types of values that are quantized, and how many fill 16 bytes."""


def gather_kernels() -> list[KernelEntry]:
    """One entry for each kernel and each set of constants that the wrappers launch."""
    return [*_gather_entries(), *_table_entries(), *_row_entries(), *_quantize_entries(), _meet_entry()]


def _numbers(narrow: str, wide: str) -> dict[str, str]:
    return dict.fromkeys(narrow.split(), "i32") | dict.fromkeys(wide.split(), "i64")


def _constants(sizes: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of a kernel, and its launch options."""
    return {name: size for name, size in sizes.items() if name != "num_warps"}, {"num_warps": sizes["num_warps"]}


def _gather_entries() -> list[KernelEntry]:
    common = {"local_start": "*i32", "out_values": "*i32", "out_scales": "*i32"}
    common |= _numbers("num_keys keys_per_rank num_regions steps dcp_size interleave", "")
    types = {"values": "*i32", "scales": "*i32", **common} | _numbers("", "value_stride scale_stride")
    sizes, options = _constants(gather_keys.row_sizes(INDEX_DIM))
    kernel = gather_keys._gather_keys_kernel
    entries = [KernelEntry(f"gather_keys-unit{u}", kernel, types, {"UNIT": u, **sizes}, options) for u in (1, 2, 4)]
    types = {"peers": "*i64", **common}
    return [*entries, KernelEntry("pull_keys", gather_keys._pull_keys_kernel, types, sizes, options)]


def _table_entries() -> list[KernelEntry]:
    common = {"local_start": "*i32", "block_tables": "*i32", "key_lens": "*i32", "out_values": "*i32"}
    common |= {"out_scales": "*i32"}
    common |= _numbers(
        "num_keys num_rows steps dcp_size interleave block_size num_blocks width first_key", "table_stride page_stride"
    )
    sizes, options = _constants(gather_keys.row_sizes(INDEX_DIM))
    entries = []
    for unit in (1, 2, 4):
        constants = {"UNIT": unit, **sizes}
        own, peers = {"cache": "*i32", **common}, {"peers": "*i64", **common}
        entries += [
            KernelEntry(f"table_keys-unit{unit}", table_keys._table_keys_kernel, own, constants, options),
            KernelEntry(f"pull_table_keys-unit{unit}", table_keys._pull_table_keys_kernel, peers, constants, options),
        ]
    return entries


def _row_entries() -> list[KernelEntry]:
    """Rows of the latent caches, and packed index keys; pages and rows as the package allocates them."""
    types = {"cache": "*i32", "rows": "*i32", "slots": "*i64"}
    types |= _numbers("", "num_rows num_blocks block_size page_stride row_stride")
    entries = []
    formats = {"v32": (V32_BYTES, 0, 4), "v4": (V4_MAIN_BYTES, V4_SIDE_BYTES, 2), "index": (INDEX_DIM, 4, 1)}
    for name, (main, side, row_unit) in formats.items():
        sizes, options = _constants(paged_rows.row_sizes(main, side))
        for write in (0, 1):
            constants = {"PAGE_UNIT": 4, "ROW_UNIT": row_unit, "WRITE": write, **sizes}
            label = f"{'write' if write else 'read'}_rows-{name}"
            entries.append(KernelEntry(label, paged_rows._move_rows_kernel, types, constants, options))
    return entries


def _quantize_entries() -> list[KernelEntry]:
    entries = []
    for dtype, unit in VALUE_TYPES.items():
        for pow2 in (False, True):
            sizes, options = _constants(fp8.group_sizes(INDEX_DIM, pow2))
            label = f"{dtype}{'-pow2' if pow2 else ''}"
            types = {"values": f"*{dtype}", "quantized": "*fp8e4nv", "scales": "*fp32"}
            types |= _numbers("groups_a_token", "num_groups stride")
            entries.append(
                KernelEntry(f"quantize-{label}", fp8._quantize_kernel, types, {"UNIT": unit, **sizes}, options)
            )
            types = {"keys": f"*{dtype}", "slots": "*i64", "cache": "*fp8e4nv", "cache_scales": "*fp32"}
            types |= _numbers("", "num_keys num_blocks block_size key_stride page_stride")
            kernel, constants = index_cache._quantize_index_keys_kernel, {"UNIT": unit, "PAGE_UNIT": 16, **sizes}
            entries.append(KernelEntry(f"quantize_index_keys-{label}", kernel, types, constants, options))
    return entries


def _meet_entry() -> KernelEntry:
    types = {"pads": "*i64", "own_pad": "*i32", "state": "*i32"} | _numbers("place size", "timeout_ns")
    # its clock is an NVIDIA register
    return KernelEntry("meet", meet._meet_kernel, types, {"RANKS": 8}, {"num_warps": 1}, ("sm_90", "sm_100"))
