"""Settings of every test process: hypothesis without a clock, and Triton's interpreter where there is no GPU."""

import os
from pathlib import Path

from hypothesis import settings

# A shared machine may be slow, and slow is not wrong.
settings.register_profile("cpkit", deadline=None, print_blob=True)
settings.load_profile("cpkit")

# Read when kernels are defined, that is by whichever test imports one first.
if not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
