import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """program.py under `cpkit record`, all scenes at once: a folder with logs/, what was said in stderr, and in
    dumps-SCENE/ the flight recorder's dumps. A sitecustomize that was on the path before is there, too.
    """
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "sitecustomize.py").write_text("import sys; print('own hook', file=sys.stderr)\n")
    path = f"{folder}:{ROOT}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_FR_BUFFER_SIZE": "100"}
    record = [sys.executable, "-m", "cpkit", "record", "--out", str(folder / "logs"), "--"]
    program = [sys.executable, str(Path(__file__).with_name("program.py")), str(folder), "skip", "killed", "whole"]
    done = subprocess.run(
        [*record, *program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    (folder / "stderr").write_text(done.stderr)
    return folder
