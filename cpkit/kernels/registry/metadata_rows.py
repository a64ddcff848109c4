"""Kernels that spread a step's rows over tokens: key ranges, windows, decode rows, remapping, tile schedules.

Counts, lengths, ranks and strides are arguments, so that a kernel is compiled once for each kind of cache: its ratio,
its DCP placement, its block size.
"""

from cpkit.kernels import decode_lens, key_ranges, position_slots, swa_indices, tile_schedule
from cpkit.kernels.dcp_local_lens import shard_constants
from cpkit.kernels.registry.entry import KernelEntry
from cpkit.kernels.registry.metadata import make_entry
from cpkit.kernels.registry.sizes import SAMPLES, KernelSizes


def row_kernels() -> list[KernelEntry]:
    """The kernels of the sample deployments, each once."""
    entries = [entry for deployment in SAMPLES.values() for entry in row_keys(deployment)]
    return list({entry.name: entry for entry in entries}.values())


def row_keys(deployment: KernelSizes) -> list[KernelEntry]:
    """Every kernel that any rank of a deployment launches in any step."""
    entries = [*_schedules(), *_windows(deployment)]
    for ratio in deployment.ratios():
        entries += [_ranges(deployment, ratio), *_decodes(deployment, ratio)]
    for ratio, keys_per_block in ((1, deployment.block_size), *deployment.states):
        entries += _slots(deployment, keys_per_block, max(deployment.interleave // ratio, 1))
    given = {"REMAP": False, "BLOCK_SIZE": 1, **shard_constants(1, 1)}
    entries += [_slot_entry("compact_slots", "_compact_kernel", kind, given) for kind in ("i32", "i64")]
    return list({entry.name: entry for entry in entries}.values())


def _types(pointers: str, counts: str, strides: str = "") -> dict[str, str]:
    """Argument types by name: int32 pointers, int32 and int64 numbers."""
    kinds = (("*i32", pointers), ("i32", counts), ("i64", strides))
    return {name: kind for kind, names in kinds for name in names.split()}


def _ranges(deployment: KernelSizes, ratio: int) -> KernelEntry:
    """Under PCP + DCP ranges in gathered keys, else in a rank's own."""
    types = _types(
        "query_start_loc seq_lens row_stride key_start_loc key_start key_end key_rows",
        "strided num_rows token_start num_tokens num_keys",
        "span_start span_stop dcp_rank",
    )
    types["region_start"] = "*i64"
    gathered = deployment.pcp_size > 1
    constants = key_ranges.range_constants(ratio, 1 if gathered else deployment.dcp_size, deployment.interleave)
    return make_entry("key_ranges", key_ranges, "_key_ranges_kernel", types, constants)


def _windows(deployment: KernelSizes) -> list[KernelEntry]:
    types = _types(
        "query_start_loc seq_lens token_to_req block_tables replay_start row_stride indices lens",
        "num_replayed strided num_rows token_offset num_out window_size index_width table_width",
        "table_stride index_stride",
    )
    types["is_valid"] = "*i1"
    kinds = ([False] if deployment.swa_block_size else []) + ([True] if deployment.draft_blocks else [])
    return [
        make_entry(
            "swa_indices",
            swa_indices,
            "_swa_indices_kernel",
            types,
            {"BLOCK_SIZE": deployment.swa_block_size, "DRAFT": draft},
            ("ROWS", "COLUMNS"),
        )
        for draft in kinds
    ]


def _decodes(deployment: KernelSizes, ratio: int) -> list[KernelEntry]:
    types = _types(
        "query_start_loc seq_lens block_tables row_lens global_lens query_lens row_req row_tables",
        "num_reqs num_rows width table_width",
        "table_stride lens_stride row_table_stride dcp_rank",
    )
    cache = decode_lens.decode_constants(ratio, deployment.dcp_size, deployment.interleave)
    return [
        make_entry(
            "decode_rows", decode_lens, "_decode_rows_kernel", types, {**cache, "FLAT": flat}, ("ROWS", "COLUMNS")
        )
        for flat in (False, True)
    ]


def _slots(deployment: KernelSizes, keys_per_block: int, interleave: int) -> list[KernelEntry]:
    """Positions and slots of one type, int32 or int64; interleave in keys."""
    shard = shard_constants(deployment.dcp_size, interleave)
    cache = {"BLOCK_SIZE": keys_per_block, **shard}
    entries = []
    for kind in ("i32", "i64"):
        entries.append(_slot_entry("shard_slots", "_shard_slots_kernel", kind, cache))
        entries.append(_slot_entry("compact_shard_slots", "_compact_kernel", kind, {"REMAP": True, **cache}))
        if deployment.pcp_size > 1 and deployment.dcp_size > 1:
            entries.append(_slot_entry("gathered_slots", "_gathered_slots_kernel", kind, shard))
    return entries


def _slot_entry(name: str, kernel: str, kind: str, constants: dict[str, int]) -> KernelEntry:
    types = _types(
        "req idx_mapping block_tables counts",
        "k num_rows num_mapped width dcp_rank",
        "position_stride table_stride out_stride block_stride rank_stride",
    )
    types |= dict.fromkeys(("positions", "workspace_start", "out"), f"*{kind}")
    return make_entry(f"{name}-{kind}", position_slots, kernel, types, constants, ("COLUMNS",))


def _schedules() -> list[KernelEntry]:
    types = _types("num_keys req out", "num_rows num_workers tile", "out_stride")
    return [
        make_entry(
            "tile_schedule", tile_schedule, "_tile_schedule_kernel", types, {"GROUPED": grouped}, ("WORKERS", "ROWS")
        )
        for grouped in (False, True)
    ]
