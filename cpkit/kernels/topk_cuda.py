"""The selection of topk.py on NVIDIA GPUs: CUDA C++, compiled when first used by the runtime compiler in torch.

Which kernel selects depends on the shape of the matrix, which the host knows without asking the device:

    keys a row                            kernel            a row is selected by
    up to 8,192 / 16,384                  topk_rows_8k/16k  one block, which holds it in shared memory
    up to 131,072, few rows               topk_rows_128k    a cluster of 8 blocks, each holding a part
    up to 1,048,576, very few rows        topk_rows_1m      such a cluster, each block reading its part twice
    else                                  topk_rows         a block that samples it and keeps what passes a bound

topk_open does as topk_rows, for rows that only the device knows: those that indexer_topk.py left open.
In topk_rows several blocks share a row where rows are few, and the last of them to finish selects:

    64 rows x 131,072 keys on 132 multiprocessors, 2 blocks each      4 blocks a row

No CUDA toolkit is needed: the compiler comes with torch, and the sources include no header.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

SOURCES = ("topk_order.cu", "topk_bins.cu", "topk_team.cu", "topk_held.cu", "topk_registers.cu", "topk.cu")
CLUSTER_SOURCE = "topk_cluster.cu"
"""Behind SOURCES where the chip has clusters: compute capability 9 on."""
OPTIONS = ["--std=c++17", "--device-as-default-execution-space"]

CAPACITY = 8192
"""Survivors that a block can select among: THREADS * LEVELS of topk_registers.cu."""
BLOCKS_PER_SM = 2
"""Blocks of topk_rows that a multiprocessor runs at once."""

CLUSTER_ROWS = 33
"""Most rows that get a cluster each where it holds them: 8 blocks a row, 2 a multiprocessor of 132. In a trial on an
H200, 10 launches in a graph, 16 rows of 131,072 keys took 12.7 us by clusters and 19.5 by topk_rows, 34 rows 21.5 and
22.6, 64 rows 32.4 and 25.0."""
LONG_CLUSTER_ROWS = 12
"""The same where a cluster reads rows twice: 12 rows of 1,048,576 keys took 40.9 us and 45.4, 16 rows 76.7 and 50.0."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Threads of a block; bytes of its shared memory beside keys; blocks of a cluster; keys of a row that they hold."""

    threads: int
    shared_bytes: int
    blocks: int = 1
    most_keys: int = 0

    def bytes_for(self, num_keys: int) -> int:
        """Shared memory of a block where rows have up to num_keys keys. Parts are multiples of 128 keys."""
        part = -(-min(num_keys, self.most_keys) // self.blocks)
        return self.shared_bytes + -(-part // 128) * 128 * 4


SURVIVORS_BYTES = 8 * CAPACITY + 4 * 2048 + 4 * 2 * 3 * 16 + 32
"""sizeof(Shared) of topk_registers.cu. The other sizes are those of Row::Shared in topk_held.cu."""
HELD_BYTES = 10160
"""Of a block of 512 threads that holds a row alone, without its keys."""
HELD_KEYS = 16384
"""Keys of a row that one block holds, in topk_rows too."""
CLUSTER_KEYS, LONG_CLUSTER_KEYS = 131072, 1048576
ANY_ROW = Kernel(512, HELD_BYTES + 4 * HELD_KEYS)
KERNELS = {
    "topk_rows_8k": Kernel(256, 8112, most_keys=8192),
    "topk_rows_16k": Kernel(512, HELD_BYTES, most_keys=HELD_KEYS),
    "topk_rows": ANY_ROW,
    "topk_bounds": Kernel(512, SURVIVORS_BYTES),
    "topk_survivors": Kernel(512, SURVIVORS_BYTES),
    "topk_open": ANY_ROW,
}
CLUSTER_KERNELS = {
    "topk_rows_128k": Kernel(512, 11184, blocks=8, most_keys=CLUSTER_KEYS),
    "topk_rows_1m": Kernel(512, 48032, blocks=8),
}


def topk_rows(logits: torch.Tensor, key_start: torch.Tensor, key_end: torch.Tensor, out: torch.Tensor) -> None:
    """Write the selection; arguments as topk checked them, M at least 1."""
    (M, N), K, device = logits.shape, out.shape[1], logits.device
    facts = torch.cuda.get_device_properties(device)
    tensors, strides = (logits, key_start, key_end, out), (logits.stride(0), out.stride(0))
    name = choose_kernel(M, N, clusters=facts.major >= 9)
    if name != "topk_rows":
        launch(name, M, device, *tensors, M, N, *strides, K, num_keys=N)
        return
    splits = choose_splits(M, N, BLOCKS_PER_SM * facts.multi_processor_count)
    room = min(CAPACITY, -(-N // splits) + 3) if splits > 1 else 0
    lists = torch.empty(M * splits * room, dtype=torch.int64, device=device)
    counts = torch.empty(M * splits if splits > 1 else 0, dtype=torch.int32, device=device)
    arrived = torch.zeros(M if splits > 1 else 0, dtype=torch.int32, device=device)
    launch(name, M * splits, device, *tensors, lists, counts, arrived, N, *strides, K, splits, room)


def choose_kernel(num_rows: int, num_keys: int, *, clusters: bool) -> str:
    """The kernel for a matrix; clusters: whether the chip has them.

    8,192 x 8,192 -> topk_rows_8k;  16 x 131,072 -> topk_rows_128k;  64 x 131,072 -> topk_rows
    """
    if num_keys <= HELD_KEYS:
        return "topk_rows_8k" if num_keys <= KERNELS["topk_rows_8k"].most_keys else "topk_rows_16k"
    if clusters and num_keys <= CLUSTER_KEYS and num_rows <= CLUSTER_ROWS:
        return "topk_rows_128k"
    if clusters and CLUSTER_KEYS < num_keys <= LONG_CLUSTER_KEYS and num_rows <= LONG_CLUSTER_ROWS:
        return "topk_rows_1m"
    return "topk_rows"


def choose_splits(num_rows: int, num_keys: int, num_blocks: int) -> int:
    """Blocks of topk_rows that share a row: as many as run at once, but none with fewer than 8,192 keys.

    64 rows x 131,072 keys on 264 blocks -> 4;  16 x 1,048,576 -> 16;  4,096 x 131,072 -> 1
    """
    return max(min(num_blocks // num_rows, num_keys // CAPACITY), 1)


def launch(name: str, num_groups: int, device: torch.device, *args: torch.Tensor | int, num_keys: int = 0) -> None:
    """Run a kernel on the current stream of a device: num_groups blocks, or clusters; num_keys: the most in a row."""
    kernel = (KERNELS | CLUSTER_KERNELS)[name]
    grid, block = (num_groups * kernel.blocks, 1, 1), (kernel.threads, 1, 1)
    with torch.cuda.device(device):
        run = _compiled(torch.cuda.current_device())[name]
        run(grid=grid, block=block, args=list(args), shared_mem=kernel.bytes_for(num_keys))


def build(device: torch.device) -> None:
    """Compile and load all kernels for a device, as the first launch on it would."""
    with torch.cuda.device(device):
        _compiled(torch.cuda.current_device())


def source_text(*, clusters: bool) -> str:
    """The sources as one text."""
    names = (*SOURCES, CLUSTER_SOURCE) if clusters else SOURCES
    return "".join(resources.files("cpkit.kernels").joinpath(name).read_text() for name in names)


@lru_cache
def _compiled(device: int) -> dict[str, Any]:
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile  # not in builds of torch without CUDA

    clusters = torch.cuda.get_device_properties(device).major >= 9
    kernels = KERNELS | (CLUSTER_KERNELS if clusters else {})
    with _any_toolkit():
        binary, _ = _nvrtc_compile(source_text(clusters=clusters), next(iter(kernels)), nvcc_options=OPTIONS)
    loaded: Any = _cuda_load_module(binary, list(kernels))
    for name, kernel in kernels.items():
        loaded[name].set_shared_memory_config(kernel.bytes_for(kernel.most_keys))
    return dict(loaded)


@contextmanager
def _any_toolkit() -> Iterator[None]:
    """Torch refuses to compile where it finds no folder of a toolkit's headers, although none are included."""
    from torch.utils import cpp_extension  # here: where a toolkit is and no GPU, importing it warns

    found = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = found or str(Path(__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = found
