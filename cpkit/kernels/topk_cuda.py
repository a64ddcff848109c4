"""The selection of topk.py on NVIDIA GPUs: topk.cu, compiled when first used by the runtime compiler in torch.

One block of 512 threads selects for a row: samples of the row give a bound that a few more than k keys pass, one pass
collects those, and bisection on their bits finds the k best. Rows of up to 8,192 keys are held in registers instead.
Where rows are few, several blocks share one and the last of them to finish selects:

    64 rows x 131,072 keys on 132 multiprocessors, 2 blocks each      4 blocks a row

No CUDA toolkit is needed: the compiler comes with torch, and topk.cu includes no header.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

CAPACITY = 8192
"""Keys that a block can select among: THREADS * HELD of topk.cu."""
THREADS = 512
BLOCKS_PER_SM = 2
SHARED_BYTES = 8 * CAPACITY + 4 * 2048 + 4 * 2 * 3 * 16 + 16
"""sizeof(Shared) of topk.cu."""
OPTIONS = ["--std=c++17", "--device-as-default-execution-space"]
KERNELS = ("topk_rows", "topk_bounds", "topk_survivors")


def topk_rows(logits: torch.Tensor, key_start: torch.Tensor, key_end: torch.Tensor, out: torch.Tensor) -> None:
    """Write the selection; arguments as topk checked them, M at least 1."""
    (M, N), K, device = logits.shape, out.shape[1], logits.device
    splits = choose_splits(M, N, BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count)
    room = min(CAPACITY, -(-N // splits) + 3) if splits > 1 else 0
    lists = torch.empty(M * splits * room, dtype=torch.int64, device=device)
    counts = torch.empty(M * splits if splits > 1 else 0, dtype=torch.int32, device=device)
    arrived = torch.zeros(M if splits > 1 else 0, dtype=torch.int32, device=device)
    scratch = (lists, counts, arrived)
    launch(
        "topk_rows", M * splits, device, logits, key_start, key_end, out, *scratch, N, logits.stride(0), out.stride(0),
        K, splits, room,
    )  # fmt: skip


def choose_splits(num_rows: int, num_keys: int, num_blocks: int) -> int:
    """Blocks that share a row: as many as run at once, but none with fewer than 8,192 keys.

    64 rows x 131,072 keys on 264 blocks -> 4;  8 x 1,048,576 -> 33;  4,096 x 131,072 -> 1
    """
    return max(min(num_blocks // num_rows, num_keys // CAPACITY), 1)


def launch(name: str, num_blocks: int, device: torch.device, *args: torch.Tensor | int) -> None:
    """Run a kernel of topk.cu on the current stream of a device."""
    with torch.cuda.device(device):
        kernel = _compiled(torch.cuda.current_device())[name]
        kernel(grid=(num_blocks, 1, 1), block=(THREADS, 1, 1), args=list(args), shared_mem=SHARED_BYTES)


def build(device: torch.device) -> None:
    """Compile and load topk.cu for a device, as the first launch on it would."""
    with torch.cuda.device(device):
        _compiled(torch.cuda.current_device())


@lru_cache
def _compiled(device: int) -> dict[str, Any]:
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile  # not in builds of torch without CUDA

    source = resources.files("cpkit.kernels").joinpath("topk.cu").read_text()
    with _any_toolkit():
        binary, _ = _nvrtc_compile(source, KERNELS[0], nvcc_options=OPTIONS)
    kernels: Any = _cuda_load_module(binary, list(KERNELS))
    for kernel in kernels.values():
        kernel.set_shared_memory_config(SHARED_BYTES)
    return dict(kernels)


@contextmanager
def _any_toolkit() -> Iterator[None]:
    """Torch refuses to compile where it finds no folder of a toolkit's headers, although none are included."""
    found = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = found or str(Path(__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = found
