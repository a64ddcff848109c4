"""Every kernel compiles for every target without a GPU, and spills no more registers than its entry allows.

To save minutes not with all constants that its file lists: with a few, evenly spread, for sm_90, and with the first and
the last for the other chips. Hopper's own kernels come with nearly all of theirs.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

# A process of its own: where tests run kernels through the interpreter, Triton's compiler is switched off.
COMPILE_ALL = """
import json, sys
from cpkit.kernels.registry import all_kernels
from cpkit.kernels.registry.entry import compile_kernel, spilled_bytes
by_kernel = {}
for entry in all_kernels():
    if sys.argv[1] in entry.targets:
        by_kernel.setdefault(id(entry.kernel), []).append(entry)
for entries in by_kernel.values():
    gaps = 7 if entries[0].kernel.is_gluon() else 3 if sys.argv[1] == "sm_90" else 1
    for entry in entries[:: max((len(entries) - 1) // gaps, 1)]:
        spilled = spilled_bytes(compile_kernel(entry, sys.argv[1]))
        print(json.dumps([entry.name, spilled, entry.spill_bytes]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_all_kernels_compile_within_their_registers(target):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE_ALL, target], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    over = [f"{name}: {spilled} bytes spilled, {bound} allowed" for name, spilled, bound in compiled if spilled > bound]
    assert not over
    names = {name for name, _, _ in compiled}
    assert {"mqa_logits-H32", "mqa_logits-H64-shards", "topk-k512", "topk-k2048"} <= names
    # The Hopper kernel alone is tied to one chip: it is made of wgmma, which only sm_90 has.
    variants = [f"{keys}{rows}" for keys in ("", "-shards") for rows in ("", "-open")]
    hopper = {f"mqa_logits_hopper-H{H}{variant}" for H in (32, 64) for variant in variants}
    assert hopper & names == (hopper if target == "sm_90" else set())
