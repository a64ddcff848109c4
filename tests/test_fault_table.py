"""docs/faults.md lists every known fault once, with tests that exist or the reason why it waits."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = [
    tuple(cell.strip() for cell in line.strip("|\n").split("|"))
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| B\d", line)
]
ODD_IDS = [f"B{number:02}" for number in range(1, 136, 2)]
"""The ids in use: odd numbers, so that a later fault can stand between two of one kind."""


def names_in(path: Path) -> set[str]:
    """Test functions of a file, and the ids of its parametrised cases."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "id" and isinstance(node.value, ast.Constant):
            names.add(node.value.value)
    return names


def test_every_fault_has_one_row():
    assert [row[0] for row in ROWS] == ODD_IDS


@pytest.mark.parametrize(("fault", "what", "test"), ROWS, ids=[row[0] for row in ROWS])
def test_row_names_its_test_or_its_reason(fault, what, test):
    assert what
    if test.startswith("waits: "):
        return
    for one in test.split(", "):
        file, _, name = one.partition("::")
        assert name in names_in(ROOT / file), f"{one} does not exist"
        assert re.search(rf"\b{fault.lower()}\b", name.replace("_", " ")), f"{one} does not carry the fault's id"
