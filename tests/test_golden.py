"""Upstream's vectors through compat: every case of every file in $CPKIT_GOLDEN_DIR (default: tests/golden).

Values are compared exactly and tensors must have the dtype that the file's header names; floats, which only the LSE
combination computes, agree within 1e-5. A refusal must be of the vector's exception type.
"""

import builtins
import gzip
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="compat takes and returns torch tensors")

from tests.golden_adapters import ADAPTERS, f32  # noqa: E402  (needs torch)

FOLDER = Path(os.environ.get("CPKIT_GOLDEN_DIR") or Path(__file__).parent / "golden")
FILES = sorted(FOLDER.glob("*.jsonl.gz"))
UNORDERED = {"merged"}
TOLERANT = {"combined", "lse"}


def read_cases():
    for path in FILES:
        name = path.name.removesuffix(".jsonl.gz")
        if name not in ADAPTERS:
            continue  # test_every_file_is_known says so
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            header, *cases = map(json.loads, lines)
        for case in cases:
            yield pytest.param(name, header["fields"], case["inputs"], case["outputs"], id=case["case"])


def test_the_folder_holds_vectors():
    assert FILES, f"{FOLDER} holds no *.jsonl.gz"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_every_file_is_known(path):
    assert path.name.removesuffix(".jsonl.gz") in ADAPTERS, f"no adapter for {path.name}: add one"


@pytest.mark.parametrize(("function", "fields", "inputs", "outputs"), list(read_cases()))
def test_vector(function, fields, inputs, outputs):
    adapter, case = ADAPTERS[function], SimpleNamespace(**inputs)
    if "error" in outputs:
        with pytest.raises(getattr(builtins, outputs["error"])):
            adapter(case)
    else:
        compare(function, adapter(case), outputs, fields)


def compare(name, got, want, fields):
    """Assert that a result is the vector's, at any depth; `name` is the field, for its dtype and for the message."""
    if isinstance(want, dict) and "error" in want:
        assert isinstance(got, getattr(builtins, want["error"])), f"{name}: {got!r} is no {want['error']}"
    elif isinstance(want, dict):
        assert isinstance(got, dict), f"{name}: {got!r}"
        assert got.keys() == want.keys(), name
        for field in want:
            compare(field, got[field], want[field], fields)
    elif isinstance(got, torch.Tensor):
        check_dtype(name, got, fields)
        compare_values(name, got, want)
    elif isinstance(want, list):
        assert len(got) == len(want), name
        for entry, wanted in zip(got, want, strict=True):
            if isinstance(entry, tuple):
                entry = list(entry)
            compare(name, entry, wanted, fields)
    else:
        assert type(got) is type(want), f"{name}: {got!r}, a {type(got).__name__}"
        assert got == want, name


def check_dtype(name, got, fields):
    documented = re.search(r"\b(int32|int64|float32|bool)\b", fields.get(name, ""))
    if documented:
        assert got.dtype == getattr(torch, documented[0]), f"{name} is {got.dtype}, documented as {documented[0]}"


def compare_values(name, got, want):
    if name in UNORDERED:
        assert [sorted(row) for row in got.tolist()] == [sorted(row) for row in want], name
    elif got.dtype == torch.float32:
        tolerance = 1e-5 if name in TOLERANT else 0.0
        torch.testing.assert_close(
            got,
            f32(want).reshape(got.shape),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m: f"{name}: {m}",
        )
    else:
        assert got.tolist() == want, name
