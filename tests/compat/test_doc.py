"""docs/compat.md lists every name of compat.vllm once, beside a name of cpkit that exists."""

import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="compat takes and returns torch tensors")

from cpkit.compat import vllm

PAGE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)


def test_every_name_is_listed_once():
    assert sorted(name for name, _ in ROWS) == sorted(vllm.__all__)
    assert len(ROWS) == PAGE.count("\n| `"), "a row of another form"


@pytest.mark.parametrize(("name", "ours"), ROWS, ids=[name for name, _ in ROWS])
def test_both_names_exist(name, ours):
    module, _, attribute = f"cpkit.{ours}".rpartition(".")
    assert hasattr(vllm, name)
    assert hasattr(importlib.import_module(module), attribute)
