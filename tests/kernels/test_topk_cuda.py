"""The CUDA sources of top-k, without a GPU: they compile for every NVIDIA target and fit; which kernel rows get."""

import re
import shutil
import subprocess

import pytest

pytest.importorskip("torch")

from cpkit.kernels.topk_cuda import (
    CAPACITY,
    CLUSTER_KERNELS,
    HELD_KEYS,
    KERNELS,
    SURVIVORS_BYTES,
    choose_kernel,
    choose_splits,
    source_text,
)

ALL_KERNELS = KERNELS | CLUSTER_KERNELS
REGISTERS = {"topk_rows_8k": 51, "topk_rows_16k": 42, "topk_rows_1m": 128}
"""Of 65,536 a multiprocessor: for 5 blocks of 256 threads, 3 of 512, 1; the other kernels have 64, for 2."""


def nvcc(folder, source, *arguments):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc on this machine")
    whole = folder / "whole.cu"
    whole.write_text(source)
    command = [compiler, "-std=c++17", "-o", folder / "out", *arguments, whole]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_compiles_within_its_registers(tmp_path):
    done = nvcc(tmp_path, source_text(clusters=True), "-arch=sm_90", "-cubin", "-Xptxas", "-v")
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"properties for (\w+)\n.*?(\d+) bytes spill stores.*?\n.*?Used (\d+) registers", done.stderr)
    assert {name for name, _, _ in found} == set(ALL_KERNELS)
    for name, spilled, registers in found:
        assert int(registers) <= REGISTERS.get(name, 64), found
        assert int(spilled) <= (160 if name in ("topk_rows", "topk_open") else 0), found


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_wrapper_knows_the_sizes_of_the_sources(target, tmp_path):
    """They are read from the only error of a compilation: so the sources are in order for each target, too."""
    rows = {"topk_rows_8k": "256, held::Alone, true", "topk_rows_16k": "512, held::Alone, true"}
    if target != "sm_80":  # it has no clusters
        rows |= {"topk_rows_128k": "512, held::Cluster, true", "topk_rows_1m": "512, held::Cluster, false"}
    sizes = [f"(int)sizeof(held::Row<{arguments}>::Shared)" for arguments in rows.values()]
    sizes += ["HeldRow::MAX_PART", "CAPACITY", "(int)sizeof(Shared)"]
    asked = f"template <int... N> struct Sizes; Sizes<{', '.join(sizes)}> sizes;"
    done = nvcc(tmp_path, source_text(clusters=target != "sm_80") + asked, f"-arch={target}", "-cubin")
    known = [ALL_KERNELS[name].shared_bytes for name in rows] + [HELD_KEYS, CAPACITY, SURVIVORS_BYTES]
    assert f"Sizes<{', '.join(map(str, known))}>" in done.stderr, done.stderr[-3000:]
    assert "1 error detected" in done.stderr, done.stderr[-3000:]


def test_topk_rows_has_room_for_rows_that_it_holds_and_for_survivors():
    assert KERNELS["topk_rows"].bytes_for(0) >= max(KERNELS["topk_rows_16k"].bytes_for(HELD_KEYS), SURVIVORS_BYTES)


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "kernel"),
    [
        pytest.param(1, 1, "topk_rows_8k", id="one-key"),
        pytest.param(8192, 8192, "topk_rows_8k", id="8k"),
        pytest.param(1, 8193, "topk_rows_16k", id="beyond-8k"),
        pytest.param(4096, 16384, "topk_rows_16k", id="16k"),
        pytest.param(33, 16385, "topk_rows_128k", id="beyond-16k"),
        pytest.param(34, 16385, "topk_rows", id="more-rows-than-clusters"),
        pytest.param(33, 131072, "topk_rows_128k", id="128k"),
        pytest.param(12, 131073, "topk_rows_1m", id="beyond-128k"),
        pytest.param(13, 131073, "topk_rows", id="more-rows-than-long-clusters"),
        pytest.param(1, 1 << 20, "topk_rows_1m", id="1m"),
        pytest.param(1, (1 << 20) + 1, "topk_rows", id="beyond-1m"),
    ],
)
def test_choose_kernel(num_rows, num_keys, kernel):
    assert choose_kernel(num_rows, num_keys, clusters=True) == kernel
    assert choose_kernel(num_rows, num_keys, clusters=False) == (kernel if num_keys <= HELD_KEYS else "topk_rows")


@pytest.mark.parametrize(
    ("num_keys", "kernel", "shared_bytes"),
    [
        pytest.param(1, "topk_rows_8k", 8112 + 4 * 128, id="one-key"),
        pytest.param(128, "topk_rows_8k", 8112 + 4 * 128, id="128-keys"),
        pytest.param(129, "topk_rows_8k", 8112 + 4 * 256, id="129-keys"),
        pytest.param(16385, "topk_rows_128k", 11184 + 4 * 2176, id="parts-of-2049-keys"),
        pytest.param(131072, "topk_rows_128k", 11184 + 4 * 16384, id="full-parts"),
        pytest.param(1 << 20, "topk_rows_1m", 48032, id="keys-elsewhere"),
    ],
)
def test_shared_memory(num_keys, kernel, shared_bytes):
    assert ALL_KERNELS[kernel].bytes_for(num_keys) == shared_bytes


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "splits"),
    [
        pytest.param(1, 16385, 2, id="two-blocks-worth"),
        pytest.param(64, 131072, 4, id="decode"),
        pytest.param(8, 1 << 20, 33, id="few-long-rows"),
        pytest.param(264, 131072, 1, id="a-row-a-block"),
        pytest.param(4096, 131072, 1, id="prefill"),
    ],
)
def test_choose_splits(num_rows, num_keys, splits):
    assert choose_splits(num_rows, num_keys, num_blocks=264) == splits
