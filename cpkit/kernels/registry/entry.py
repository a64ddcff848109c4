"""A kernel with the signature it is compiled with, and how it is compiled on a machine without a GPU.

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

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


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


def descriptor(dtype: str, box: tuple[int, int], *, swizzle: int = 128) -> str:
    """The type of a TMA descriptor as Triton spells it, of boxes of values of 8 or 32 bits."""
    bits = 8 if dtype == "fp8e4nv" else 32
    layout = (
        f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank=2, transposed=False, "
        "fp4_padded=False, cga_layout=[])"
    )
    return f"tensordesc<{dtype}[{box[0]},{box[1]}],{layout}>"


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
