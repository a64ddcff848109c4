"""Imports go one way, from the nouns up, and what plans on a laptop imports no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cpkit

PACKAGE = Path(cpkit.__file__).parent
FLOORS = (
    ("errors", "arrays", "digest", "layers", "processes"),
    ("topology", "batch", "hf_config"),
    ("model",),
    ("budget",),
    ("planner",),
    ("step",),
    ("settings",),
    ("views",),
    ("kernels",),
    ("activations",),
    ("builders",),
    ("comm",),
    ("merge",),
    ("worker",),
    ("oracle",),
    ("workload", "promises"),
    ("sizing",),
    ("consistency",),
    ("simulate", "run"),
    ("report",),
    ("compat", "cli"),
)
"""A room or file at the root of cpkit imports from lower floors alone."""

SIZING_FLOORS = (
    ("figures",),
    ("chips", "weights"),
    ("deployment",),
    ("rules",),
    ("memory", "cost"),
    ("verdict", "sweep"),
)
"""The same inside sizing."""

FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
SIZING_FLOOR = {name: floor for floor, names in enumerate(SIZING_FLOORS) for name in names}
WITHOUT_TORCH = ("planner", "promises", "workload", "simulate", "views", "sizing")


def files_of(name):
    """The files of a room and of the rooms in it, or the one file at the root."""
    return sorted((PACKAGE / name).rglob("*.py")) or [PACKAGE / f"{name}.py"]


def imported(path, room="cpkit"):
    """First names below a room that a file imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == room:
            names |= {f"{room}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return {name.removeprefix(f"{room}.").split(".")[0] for name in names if name.startswith(f"{room}.")}


@pytest.mark.parametrize("name", FLOOR)
def test_imports_go_down(name):
    for path in files_of(name):
        up = {other for other in imported(path) - {name} if FLOOR.get(other, -1) >= FLOOR[name]}
        assert not up, f"{path.name} imports {sorted(up)} from its own floor or above"


@pytest.mark.parametrize("name", SIZING_FLOOR)
def test_imports_go_down_in_sizing(name):
    for path in files_of(f"sizing/{name}"):
        up = {
            other
            for other in imported(path, "cpkit.sizing") - {name}
            if SIZING_FLOOR.get(other, len(SIZING_FLOORS)) >= SIZING_FLOOR[name]
        }
        assert not up, f"{path.name} imports {sorted(up)} from its own floor or above"


def test_every_room_of_sizing_has_a_floor():
    assert {path.stem for path in (PACKAGE / "sizing").iterdir()} - {"__init__", "__pycache__"} == set(SIZING_FLOOR)


def test_the_planning_half_imports_no_torch():
    paths = [path.relative_to(PACKAGE.parent) for name in WITHOUT_TORCH for path in files_of(name)]
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    program = (
        "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
