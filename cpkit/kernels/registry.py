"""The indexer kernels and the signatures they are compiled with, to compile them on a machine without a GPU.

`indexer_kernels()` lists one entry for each kernel and each set of constants that the wrappers launch.
`compile_kernel` builds one for a target; `spilled_bytes` reads from the result how many bytes per thread went to memory
for want of registers.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from cpkit.kernels import mqa_logits, topk
from cpkit.kernels import mqa_logits_gluon as hopper

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TILE = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2, transposed=False, fp4_padded=False, "
    "cga_layout=[])"
)


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel with one set of constants: argument types by name, and where it is meant to run."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, int]
    options: dict[str, int]  # launch options: num_warps, maxnreg
    targets: tuple[str, ...] = tuple(TARGETS)
    spill_bytes: int = 0  # most bytes per thread that may spill


def indexer_kernels() -> list[KernelEntry]:
    """Logits for 32 and 64 heads, portable and Hopper, and top-k for every k and both sizes of row."""
    return [*_logits_entries(), *_topk_entries()]


def compile_kernel(entry: KernelEntry, target: str) -> Any:
    """The kernel compiled for a name in TARGETS; pointers and strides as torch allocates them, 16-byte aligned."""
    source = GluonASTSource if entry.kernel.is_gluon() else ASTSource
    names = entry.kernel.arg_names
    signature = {name: entry.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in entry.constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    options = entry.options if TARGETS[target].backend == "cuda" else {"num_warps": entry.options["num_warps"]}
    return triton.compile(source(entry.kernel, signature, constants, aligned), target=TARGETS[target], options=options)


def spilled_bytes(compiled: Any) -> int:
    """Bytes per thread of the stack (NVIDIA) or scratch memory (AMD): where registers are spilled to."""
    if "cubin" not in compiled.asm:
        return int(re.search(r"\.private_segment_fixed_size: (\d+)", compiled.asm["amdgcn"])[1])  # type: ignore[index]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]


def _logits_entries() -> list[KernelEntry]:
    common = {"k_scale": "*fp32", "weights": "*fp32", "key_start": "*i32", "key_end": "*i32", "out": "*fp32"}
    common |= {"M": "i32", "N": "i32", "w_stride": "i64", "out_stride": "i64"}
    portable = {"q": "*fp8e4nv", "k": "*fp8e4nv", "q_stride": "i64", "k_stride": "i64", **common}
    tma = {"q_desc": f"tensordesc<fp8e4nv[128,128],{_TILE}>", "k_desc": f"tensordesc<fp8e4nv[64,128],{_TILE}>"}
    tma |= {**common, "num_items": "i32", "chunk_keys": "i32"}
    entries = []
    for H in mqa_logits.NUM_HEADS:
        sizes = {"H": H, **mqa_logits.mqa_logits_sizes(H)}
        kernel = mqa_logits._mqa_logits_kernel
        entries.append(KernelEntry(f"mqa_logits-H{H}", kernel, portable, sizes, {"num_warps": 8}))
        kernel, options = hopper._mqa_logits_hopper_kernel, {"num_warps": 4, "maxnreg": 168}
        # wgmma is an instruction of sm_90 alone
        entries.append(KernelEntry(f"mqa_logits_hopper-H{H}", kernel, tma, {"H": H}, options, ("sm_90",)))
    return entries


def _topk_entries() -> list[KernelEntry]:
    rows = {"logits": "*fp32", "key_start": "*i32", "key_end": "*i32", "out": "*i32", "is_open": "*i8"}
    rows |= {"M": "i32", "N": "i32", "row_stride": "i64"}
    slots = {**rows, "slots": "*i64", "packed": "*i64"}
    exact_options, options = {"num_warps": topk.NUM_WARPS}, {"num_warps": topk.NUM_WARPS, "maxnreg": 64}
    entries = []
    for k in topk.TOPK:
        for num_keys, spill in ((131072, 256), (1 << 20, 576)):  # 64 registers: two programs share a multiprocessor
            sizes = {"K": k, **topk.topk_sizes(num_keys)}
            name = f"topk-k{k}-{num_keys}"
            entries.append(KernelEntry(name, topk._topk_kernel, slots, sizes, options, spill_bytes=spill))
        sizes = {"K": k, "BLOCK": topk.EXACT_BLOCK}
        entries.append(
            KernelEntry(f"topk_exact-k{k}", topk._topk_exact_kernel, rows, sizes, exact_options, spill_bytes=128)
        )
    return entries
