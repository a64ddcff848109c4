"""Kernels of slots, lengths and index arrays: which of them a deployment compiles, with which constants."""

from types import ModuleType

from cpkit.kernels import (
    compressed_slots,
    dcp_local_lens,
    deinterleave,
    gather_lens,
    step_slots,
    tail_slots,
    token_to_req,
)
from cpkit.kernels.registry.entry import KernelEntry
from cpkit.kernels.registry.sizes import SAMPLES, KernelSizes

_ROWS = {"query_start_loc": "*i32", "seq_lens": "*i32", "row_stride": "*i32", "strided": "i32", "num_rows": "i32"}


def metadata_kernels() -> list[KernelEntry]:
    """The kernels of the sample deployments, each once."""
    entries = [entry for deployment in SAMPLES.values() for entry in metadata_keys(deployment)]
    return list({entry.name: entry for entry in entries}.values())


def metadata_keys(deployment: KernelSizes) -> list[KernelEntry]:
    """Every kernel that any rank of a deployment launches in any step."""
    entries = [_token_to_req(), _gather_lens(), *_step_slots(deployment), *_compressed_slots(deployment)]
    if deployment.kpool:
        entries.append(_tail_slots(deployment.kpool))
    for interleave in _key_interleaves(deployment):
        entries += _placement(deployment, interleave)
    return entries


def _token_to_req() -> KernelEntry:
    types = {"query_start_loc": "*i32", "out": "*i32", "num_rows": "i32", "num_mapped": "i64", "num_tokens": "i64"}
    return make_entry("token_to_req", token_to_req, "_token_to_req_kernel", types, {})


def _gather_lens() -> KernelEntry:
    types = dict.fromkeys(("query_start_loc", "seq_lens", "replay_start", "row_stride", "out"), "*i32")
    types |= {"has_replay": "i32", "strided": "i32", "window_size": "i64", "num_rows": "i64"}
    return make_entry("gather_lens", gather_lens, "_gather_lens_kernel", types, {})


def _compressed_slots(deployment: KernelSizes) -> list[KernelEntry]:
    """Under PCP + DCP the packed form and its inverse, else each rank's own slots."""
    packed = deployment.pcp_size > 1 and deployment.dcp_size > 1
    types = {**_ROWS, "tokens": "*i1" if packed else "*i64", "block_tables": "*i32", "out": "*i64", "width": "i32"}
    types |= dict.fromkeys(("table_stride", "num_tokens", "num_out"), "i64")
    entries = []
    for ratio, per_block in deployment.states:
        sizes = compressed_slots.state_constants(ratio, per_block, deployment.dcp_size, deployment.interleave)
        constants = {**sizes, "PACKED": packed}
        entries.append(make_entry("compressed_slots", compressed_slots, "_compressed_slots_kernel", types, constants))
    if packed and deployment.states:
        types = {"packed": "*i64", "out": "*i64", "dcp_rank": "i64", "num_packed": "i64", "num_out": "i64"}
        constants = {"DCP_SIZE": deployment.dcp_size}
        entries.append(make_entry("unpack_compressed_slots", compressed_slots, "_unpack_kernel", types, constants))
    return entries


def _tail_slots(kpool: int) -> KernelEntry:
    types = {"slot_mapping": "*i64", "positions": "*i64", "query_start_loc": "*i32", "block_tables": "*i32"}
    types |= {"out": "*i64", "num_rows": "i32"} | dict.fromkeys(("table_stride", "num_tokens", "num_out"), "i64")
    return make_entry("tail_slots", tail_slots, "_tail_slots_kernel", types, {"KPOOL": kpool})


def _step_slots(deployment: KernelSizes) -> list[KernelEntry]:
    """With and without the states of each cache, with and without the tail where there is one."""
    types = {**_ROWS, "writes_kv": "*i1", "masked": "i32", "token_width": "i32", "state_width": "i32"}
    types |= {f"{kind}_tables": "*i32" for kind in ("token", "state", "tail")}
    types |= {f"{kind}_out": "*i64" for kind in ("token", "state", "tail")}
    types |= {f"{kind}_stride": "i64" for kind in ("token", "state", "tail")}
    types |= {"dcp_rank": "i64", "num_written": "i64", "num_out": "i64"}
    entries = []
    for ratio, per_block in ((0, 1), *deployment.states):
        for kpool in sorted({0, deployment.kpool}):
            constants = step_slots.step_constants(
                deployment.block_size, ratio, per_block, kpool, deployment.dcp_size, deployment.interleave
            )
            entries.append(make_entry("step_slots", step_slots, "_step_slots_kernel", types, constants))
    return entries


def _placement(deployment: KernelSizes, interleave: int) -> list[KernelEntry]:
    """Lengths of shards, and under PCP + DCP the way back to token order; interleave in keys."""
    constants = dcp_local_lens.shard_constants(deployment.dcp_size, interleave)
    entries = []
    for lens in ("*i32", "*i64"):
        types = {"lens": lens, "out": lens}
        types |= dict.fromkeys(("num_lens", "width", "lens_stride", "out_stride", "dcp_rank"), "i64")
        name = f"dcp_local_lens-{lens[1:]}"
        entries.append(make_entry(name, dcp_local_lens, "_dcp_local_lens_kernel", types, constants))
    if deployment.pcp_size > 1 and deployment.dcp_size > 1:
        types = {"local_start": "*i64", "out": "*i64", "num_regions": "i32", "num_keys": "i64"}
        entries.append(make_entry("deinterleave_idx", deinterleave, "_deinterleave_kernel", types, constants))
    return entries


def _key_interleaves(deployment: KernelSizes) -> list[int]:
    """The interleaves of all kinds of caches, in their keys."""
    if deployment.dcp_size == 1:
        return [1]
    return sorted({deployment.interleave // ratio for ratio in (1, *(ratio for ratio, _ in deployment.states))})


def make_entry(
    name: str,
    module: ModuleType,
    kernel: str,
    types: dict[str, str],
    constants: dict[str, int],
    blocks: tuple[str, ...] = ("BLOCK",),
) -> KernelEntry:
    """An entry named for its function and the constants that tell it from the function's others.

    types: may name arguments that only others of the module's kernels have. blocks: the module's block sizes.
    """
    parts = [name, *(f"{key.lower()}{int(value)}" for key, value in constants.items())]
    function = getattr(module, kernel)
    types = {at: spelled for at, spelled in types.items() if at in function.arg_names}
    constants = constants | {block: getattr(module, block) for block in blocks}
    return KernelEntry("-".join(parts), function, types, constants, {"num_warps": module.NUM_WARPS})
