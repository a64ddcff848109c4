"""Upstream's whole builds through compat's builders; truth are the vectors of indexer_build and swa_build."""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="compat takes and returns torch tensors")

import builtins  # noqa: E402

from tests.golden_adapters import builders  # noqa: E402
from tests.test_golden import compare  # noqa: E402

FOLDER = Path(os.environ.get("CPKIT_GOLDEN_DIR") or Path(__file__).parents[1] / "golden")


def cases(name):
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        header, *found = map(json.loads, lines)
    for case in found:
        yield pytest.param(name, header["fields"], case["inputs"], case["outputs"], id=case["case"])


@pytest.mark.parametrize(("name", "fields", "inputs", "outputs"), [*cases("indexer_build"), *cases("swa_build")])
def test_whole_build(name, fields, inputs, outputs):
    build, case = getattr(builders, name), SimpleNamespace(**inputs)
    if "error" in outputs:
        with pytest.raises(getattr(builtins, outputs["error"])):
            build(case)
    else:
        compare(name, build(case), outputs, fields)
