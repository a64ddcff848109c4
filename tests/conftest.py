"""Settings of every test process: hypothesis without a clock, torch on one thread, Triton interpreted without a GPU."""

import os
from pathlib import Path

from hypothesis import settings

# A shared machine may be slow, and slow is not wrong.
settings.register_profile("cpkit", deadline=None, print_blob=True)
settings.load_profile("cpkit")

# Read when torch is imported. Workers and ranks share the cores already: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Read when kernels are defined, that is by whichever test imports one first.
if not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
