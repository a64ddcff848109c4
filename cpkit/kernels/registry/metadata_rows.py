"""Kernels that spread a step's rows over tokens: key ranges, windows, decode rows, remapping, tile schedules.

Counts, lengths, ranks and strides are arguments, so that a kernel is compiled once for each kind of cache: its ratio,
its DCP placement, its block size. The caches here are like those in use, and one is odd in every number.
"""

from typing import Any

from cpkit.kernels import decode_lens, key_ranges, position_slots, swa_indices, tile_schedule
from cpkit.kernels.registry.entry import KernelEntry

CACHES = {"plain": (1, 1, 1), "sharded": (1, 8, 64), "compressed": (4, 2, 64), "odd": (3, 5, 21)}
"""By name: compress_ratio, dcp_size, interleave in tokens."""


def row_kernels() -> list[KernelEntry]:
    """One entry for each kernel, each of its forms and each kind of cache."""
    return [*_range_entries(), *_window_entries(), *_decode_entries(), *_slot_entries(), *_schedule_entries()]


def _types(pointers: str, counts: str, strides: str = "") -> dict[str, str]:
    """Argument types by name: int32 pointers, int32 and int64 numbers."""
    kinds = (("*i32", pointers), ("i32", counts), ("i64", strides))
    return {name: kind for kind, names in kinds for name in names.split()}


def _range_entries() -> list[KernelEntry]:
    types = _types(
        "query_start_loc seq_lens row_stride key_start_loc key_start key_end key_rows",
        "strided num_rows token_start num_tokens num_keys",
        "span_start span_stop dcp_rank",
    )
    types["region_start"] = "*i64"
    layouts = {name: key_ranges.range_constants(*cache) for name, cache in CACHES.items()}
    return [
        _entry(f"key_ranges-{name}", key_ranges._key_ranges_kernel, types, {**cache, "BLOCK": key_ranges.BLOCK})
        for name, cache in layouts.items()
    ]


def _window_entries() -> list[KernelEntry]:
    types = _types(
        "query_start_loc seq_lens token_to_req block_tables replay_start row_stride indices lens",
        "num_replayed strided num_rows token_offset num_out window_size index_width table_width",
        "table_stride index_stride",
    )
    types["is_valid"] = "*i1"
    tile = {"ROWS": swa_indices.ROWS, "COLUMNS": swa_indices.COLUMNS}
    return [
        _entry(
            f"swa_indices-{name}-{block_size}",
            swa_indices._swa_indices_kernel,
            types,
            {"BLOCK_SIZE": block_size, "DRAFT": draft, **tile},
        )
        for draft, name in enumerate(("causal", "draft"))
        for block_size in (64, 100)
    ]


def _decode_entries() -> list[KernelEntry]:
    types = _types(
        "query_start_loc seq_lens block_tables row_lens global_lens query_lens row_req row_tables",
        "num_reqs num_rows width table_width",
        "table_stride lens_stride row_table_stride dcp_rank",
    )
    tile = {"ROWS": decode_lens.ROWS, "COLUMNS": decode_lens.COLUMNS}
    return [
        _entry(
            f"decode_rows-{form}-{name}",
            decode_lens._decode_rows_kernel,
            types,
            {**decode_lens.decode_constants(*cache), "FLAT": flat, **tile},
        )
        for flat, form in enumerate(("native", "flat"))
        for name, cache in CACHES.items()
    ]


def _slot_entries() -> list[KernelEntry]:
    cache_types = _types(
        "positions req idx_mapping block_tables out counts",
        "k num_rows num_mapped width dcp_rank",
        "position_stride table_stride out_stride block_stride",
    )
    gathered_types = _types("positions workspace_start out", "k", "position_stride out_stride rank_stride")
    wide = {"positions": "*i64", "out": "*i64"}
    caches = {"plain": (64, 1, 1), "sharded": (64, 8, 64), "odd": (21, 5, 3)}
    entries = []
    for name, cache in caches.items():
        constants = position_slots.slot_constants(*cache)
        del constants["num_warps"]
        for kind, changed in (("int32", {}), ("int64", wide)):
            types = {**cache_types, **changed}
            title, kernel = f"{name}-{kind}", position_slots._shard_slots_kernel
            entries.append(_entry(f"shard_slots-{title}", kernel, types, constants))
            compact = {**constants, "REMAP": True}
            entries.append(_entry(f"compact_shard_slots-{title}", position_slots._compact_kernel, types, compact))
            types = {**gathered_types, **changed}
            gathered = {at: value for at, value in constants.items() if at != "BLOCK_SIZE"}
            entries.append(_entry(f"gathered_slots-{title}", position_slots._gathered_slots_kernel, types, gathered))
    given = {**position_slots.slot_constants(1, 1, 1), "REMAP": False}
    del given["num_warps"]
    return [*entries, _entry("compact_slots", position_slots._compact_kernel, {**cache_types, **wide}, given)]


def _schedule_entries() -> list[KernelEntry]:
    types = _types("num_keys req out", "num_rows num_workers tile", "out_stride")
    block = {"WORKERS": tile_schedule.WORKERS, "ROWS": tile_schedule.ROWS}
    return [
        _entry(f"tile_schedule-{name}", tile_schedule._tile_schedule_kernel, types, {"GROUPED": grouped, **block})
        for grouped, name in enumerate(("rows", "requests"))
    ]


def _entry(name: str, kernel: Any, types: dict[str, str], constants: dict[str, int]) -> KernelEntry:
    """An entry of 4 warps, with the types of those arguments that the kernel has."""
    return KernelEntry(
        name, kernel, {at: kind for at, kind in types.items() if at in kernel.arg_names}, constants, {"num_warps": 4}
    )
