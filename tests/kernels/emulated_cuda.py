"""Run the kernels of a CUDA source on the CPU: compiled by g++ behind emulated_cuda.h and called with numpy arrays."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).with_name("emulated_cuda.h")
ENTRY = 'extern "C" void run_{0}(void** arguments, const int* sizes) {{ emulated::run({0}, arguments, sizes); }}\n'
DYNAMIC_MEMORY = re.compile(r"extern __shared__ __align__\(16\) char (\w+)\[\];")


class EmulatedCuda:
    """The kernels of a source by name, compiled in a folder; the test is skipped where there is no g++."""

    def __init__(self, source, kernels, folder):
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no g++ on this machine")
        whole = folder / "whole.cpp"
        source = DYNAMIC_MEMORY.sub(r"char* \1 = SHARED_MEMORY;", source)
        entries = "".join(ENTRY.format(kernel) for kernel in kernels)
        whole.write_text(f'#include "{HEADER}"\n#line 1 "kernels.cu"\n{source}\n{entries}')
        command = [compiler, "-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w", "-o"]
        done = subprocess.run([*command, folder / "whole.so", whole], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
        self.library = ctypes.CDLL(str(folder / "whole.so"))

    def may_read(self, scores):
        """The one array that kernels read scores from; a read outside ends the process."""
        first = scores.ctypes.data
        self.library.may_read(ctypes.c_void_p(first), ctypes.c_void_p(first + scores.nbytes))

    def launch(self, kernel, num_blocks, num_threads, *arguments, seed, cluster=1):
        """Arrays go by address, numbers as int, None as a null pointer; seed: the order of threads and blocks, and what
        memory holds before. cluster: blocks that run together."""
        values = [
            ctypes.c_int(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.ctypes.data)
            for a in arguments
        ]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        self.library[f"run_{kernel}"](addresses, (ctypes.c_int * 4)(num_blocks, cluster, num_threads, seed))
