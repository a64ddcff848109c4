"""The CUDA source of top-k, without a GPU: it compiles for every NVIDIA target and fits; how rows are shared out."""

import re
import shutil
import subprocess
from importlib import resources

import pytest

pytest.importorskip("torch")

from cpkit.kernels.topk_cuda import CAPACITY, KERNELS, SHARED_BYTES, THREADS, choose_splits

SOURCE = resources.files("cpkit.kernels").joinpath("topk.cu")
SIZES = "template <int A, int B, int C> struct Sizes; Sizes<THREADS, CAPACITY, (int)sizeof(Shared)> sizes;"


def nvcc(folder, *arguments):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc on this machine")
    command = [compiler, "-std=c++17", "-cubin", "-o", folder / "out.cubin", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_compiles_within_its_registers(target, tmp_path):
    done = nvcc(tmp_path, f"-arch={target}", "-Xptxas", "-v", SOURCE)
    assert done.returncode == 0, done.stderr[-3000:]
    spilled = dict(re.findall(r"properties for (\w+)\n.*?(\d+) bytes spill stores", done.stderr))
    assert set(spilled) == set(KERNELS)
    assert all(int(size) <= 160 for size in spilled.values()), spilled  # two blocks a multiprocessor: 64 registers


def test_the_wrapper_knows_the_sizes_of_the_source(tmp_path):
    whole = tmp_path / "sizes.cu"
    whole.write_text(SOURCE.read_text() + SIZES)
    done = nvcc(tmp_path, "-arch=sm_90", whole)
    assert f"Sizes<{THREADS}, {CAPACITY}, {SHARED_BYTES}>" in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "splits"),
    [
        pytest.param(1, 8192, 1, id="one-row-that-fits"),
        pytest.param(1, 16384, 2, id="two-blocks-worth"),
        pytest.param(64, 131072, 4, id="decode"),
        pytest.param(8, 1 << 20, 33, id="few-long-rows"),
        pytest.param(264, 131072, 1, id="a-row-a-block"),
        pytest.param(4096, 131072, 1, id="prefill"),
    ],
)
def test_choose_splits(num_rows, num_keys, splits):
    assert choose_splits(num_rows, num_keys, num_blocks=264) == splits
