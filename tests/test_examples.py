"""The example programs and the README's run, and give what they promise."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from cpkit.cli.main import main

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

PRINTS = {  # those that run in one process
    "plan_a_step.py": "collectives of one layer",
    "compare_slots.py": "position 2 of dcp rank 0: engine 256, should be -1",
    "find_a_key.py": "dcp rank 3 stores 172 keys",
    "ownership_svg.py": "PCP rank 1: 264",
}


@pytest.mark.parametrize(("program", "words"), PRINTS.items(), ids=PRINTS.keys())
def test_example_runs(program, words, capsys):
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    assert words in capsys.readouterr().out


def test_every_example_is_run():
    assert {*PRINTS, "rank_leaves.py"} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
def test_the_rank_that_leaves_is_found(tmp_path, capsys):
    logs = tmp_path / "logs"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "cpkit", "record", "--out", logs, "--", *torchrun, EXAMPLES / "rank_leaves.py"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert main(["check", str(logs)]) == 1
    assert "call 6: missing call: not made by rank 1" in capsys.readouterr().out


def test_picture_is_what_its_program_draws(capsys):
    runpy.run_path(str(EXAMPLES / "ownership_svg.py"), run_name="__main__")
    picture = ROOT / "docs" / "images" / "ownership.svg"
    assert capsys.readouterr().out == picture.read_text(encoding="utf-8")


def test_the_readme_program_runs():
    """Rank 3 of tp=2, pcp=2 computes the decode and the two middle quarters of the prompt."""
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {}
    exec(program, names)
    assert names["plan"].ranks[3].rows.positions().tolist() == [699, *range(1024, 3072)]
