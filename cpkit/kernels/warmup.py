"""Compile before the first step what any step may launch: a compilation in mid-service stalls every rank.

A kernel is compiled once for each key: its constants, the types of its arguments, its number of warps. Constants come
from the deployment's sizes, and kernels are told not to look at the values of other arguments, so that neither a
length of 1, nor a pointer off its 16 bytes, nor a sum beyond 2^31 makes a key of its own. The list is thus complete,
and the same on every rank.

    deployment = KernelSizes(block_size=64, dcp_size=8, interleave=64, states=((4, 64),), index_dim=128)
    [key.name for key in compile_keys(deployment)]      what will be compiled
    warm_up(deployment, torch.device("cuda"))           compiles and loads it
"""

import re
from typing import Any

import torch

from cpkit.errors import ConfigError
from cpkit.kernels.gpu_kind import GpuKind, gpu_kind
from cpkit.kernels.registry.entry import KernelEntry
from cpkit.kernels.registry.gather import cache_keys
from cpkit.kernels.registry.indexer import indexer_keys
from cpkit.kernels.registry.metadata import metadata_keys
from cpkit.kernels.registry.metadata_rows import row_keys
from cpkit.kernels.registry.sizes import KernelSizes
from cpkit.kernels.topk_cuda import build

POINTERS = {
    "*i1": torch.bool,
    "*u8": torch.uint8,
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*fp32": torch.float32,
    "*fp8e4nv": torch.float8_e4m3fn,
}


def compile_keys(deployment: KernelSizes, gpu: GpuKind = "hopper") -> list[KernelEntry]:
    """Every key of the kernels of metadata, caches, key gathers and the indexer of a deployment."""
    keys = [*metadata_keys(deployment), *row_keys(deployment), *cache_keys(deployment)]
    return [*keys, *indexer_keys(deployment, gpu)]


def warm_up(deployment: KernelSizes, device: torch.device) -> int:
    """Compile and load every key by a launch of no programs; returns how many there are. On NVIDIA topk.cu, which has
    no keys, is built too where there is an indexer.
    """
    if device.type == "cpu":
        raise ConfigError("warm_up on cpu: kernels are compiled for the device that runs them; name a GPU")
    gpu = gpu_kind(device)
    keys = compile_keys(deployment, gpu)
    for key in keys:
        arguments = {name: stand_in(spelled, device) for name, spelled in key.types.items()}
        key.kernel[(0,)](**arguments, **key.constants, **key.options)
    if deployment.index_heads and gpu != "other":
        build(device)
    return len(keys)


def stand_in(spelled: str, device: torch.device) -> Any:
    """An argument of a type as an entry spells it; nothing reads it."""
    if spelled.startswith("tensordesc<"):
        return _descriptor(spelled, device)
    return torch.empty(1, dtype=POINTERS[spelled], device=device) if spelled in POINTERS else 0


def _descriptor(spelled: str, device: torch.device) -> Any:
    """A TMA descriptor of a type as registry/entry.py spells it, over a tensor of one box."""
    from triton.experimental.gluon.language import NVMMASharedLayout  # Gluon exists for NVIDIA builds of Triton only
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    found = re.match(r"tensordesc<(\w+)\[(\d+),(\d+)\],.*swizzle_byte_width=(\d+), element_bitwidth=(\d+)", spelled)
    assert found is not None, spelled
    box, swizzle, bits = [int(found[2]), int(found[3])], int(found[4]), int(found[5])
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    return TensorDescriptor.from_tensor(torch.empty(box, dtype=POINTERS["*" + found[1]], device=device), box, layout)
