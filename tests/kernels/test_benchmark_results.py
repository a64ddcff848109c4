"""What benchmarks keep of an earlier result's file: rows and parts that were not measured again, each with its day."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.metadata import replaced_rows  # noqa: E402
from benchmarks.timing import keep_part  # noqa: E402


def test_rows_measured_again():
    old = [{"work": "a", "shape": "1", "us": 1}, {"work": "a", "shape": "2", "us": 2, "date": "2026-01-01"}]
    before = {"date": "2026-02-02", "rows": old}
    new = [{"work": "b", "shape": "1", "us": 7}, {"work": "a", "shape": "1", "us": 8}]
    assert replaced_rows(before, new) == [
        {"work": "a", "shape": "1", "us": 8},
        {"work": "a", "shape": "2", "us": 2, "date": "2026-01-01"},
        {"work": "b", "shape": "1", "us": 7},
    ]
    assert replaced_rows(before, []) == [{**old[0], "date": "2026-02-02"}, old[1]]


def test_a_part_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a chip")
    path = tmp_path / "result.json"
    keep_part(path, "one_gpu", {"rows": [1]})
    day = json.loads(path.read_text())["date"]
    path.write_text(path.read_text().replace(day, "2026-01-01"))
    for rows in ([2], [2, 3]):
        keep_part(path, "several_gpus", {"rows": rows})
        found = json.loads(path.read_text())
        assert found["date"] >= day and found["several_gpus"] == {"rows": rows}
        assert found["one_gpu"] == {"date": "2026-01-01", "rows": [1]}
