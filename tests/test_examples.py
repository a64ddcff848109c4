"""The example programs run and print what their docstrings promise."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


PRINTS = {
    "plan_a_step.py": "collectives of one layer",
    "find_a_key.py": "dcp rank 3 stores 172 keys",
    "ownership_svg.py": "PCP rank 1: 264",
}


@pytest.mark.parametrize(("program", "words"), PRINTS.items(), ids=PRINTS.keys())
def test_example_runs(program, words, capsys):
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    assert words in capsys.readouterr().out


def test_every_example_is_run():
    assert PRINTS.keys() == {path.name for path in EXAMPLES.glob("*.py")}


def test_picture_is_what_its_program_draws(capsys):
    runpy.run_path(str(EXAMPLES / "ownership_svg.py"), run_name="__main__")
    picture = EXAMPLES.parent / "docs" / "images" / "ownership.svg"
    assert capsys.readouterr().out == picture.read_text(encoding="utf-8")
