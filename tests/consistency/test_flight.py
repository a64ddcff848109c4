"""Dumps of PyTorch's flight recorder: made by hand, and one that torch made."""

import json
import pickle
from pathlib import Path

import pytest

from cpkit.consistency.check import check
from cpkit.consistency.flight import rank_of_name, read_dump
from cpkit.errors import InputError
from tests.consistency.ranks import LOOP, A, B, C, dump

PROGRAM = Path(__file__).with_name("program.py")
SCENES = ("skip", "whole")


def write(folder, *dumps, name="nccl_trace_rank_", text=False):
    for rank, one in enumerate(dumps):
        path = folder / f"{name}{rank}{'.json' if text else ''}"
        path.write_bytes(json.dumps(one).encode() if text else pickle.dumps(one, 2))
    return folder


@pytest.mark.parametrize("text", [False, True], ids=["pickle", "json"])
def test_the_line_that_a_rank_skipped(tmp_path, text):
    result = check([write(tmp_path, dump(LOOP * 2), dump([A, C, *LOOP]), dump(LOOP * 2), text=text)])
    [found] = result.runs[0].divergences
    assert (found.kind, found.odd, found.call, result.bad) == ("missing call", (1,), 2, ())
    assert found.said[0].entered.site == "x/a.py:2"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param({"input_dtypes": ["Half"]}, "dtype", id="dtype"),
        pytest.param({"input_sizes": [[8]]}, "size", id="size"),
        pytest.param({"profiling_name": "nccl:reduce"}, "operation", id="operation"),
    ],
)
def test_another_call(tmp_path, change, kind):
    result = check([write(tmp_path, dump(LOOP), dump([A, (*B, change), C]))])
    [found] = result.runs[0].divergences
    assert (found.kind, found.call) == (kind, 2)


def test_the_side_that_is_as_large_on_all_ranks_counts(tmp_path):
    """An all-gather of uneven parts gives the same to all; all-to-alls and the input of a scatter are free."""
    calls = [("all_gather", "a.py:1"), ("scatter", "a.py:2"), ("all_to_all", "a.py:3")]
    sizes = [[4], [4], [1]], [[9], [0], [7]]
    ranks = [[(*call, {"input_sizes": [size]}) for call, size in zip(calls, own, strict=True)] for own in sizes]
    assert not check([write(tmp_path, dump(ranks[0]), dump(ranks[1]))]).diverges


def test_a_ring_that_wrapped_is_compared_where_all_ranks_still_have_it(tmp_path):
    long = LOOP * 4
    result = check([write(tmp_path, dump(long), dump(long[5:], first=5))])
    assert not result.diverges and result.runs[0].calls == 6
    assert "5 entries were overwritten" in result.remarks[0]
    assert check([write(tmp_path, dump(long), dump([*long[5:9], *long[10:]], first=5))]).diverges


def test_a_rank_that_waits(tmp_path):
    result = check([write(tmp_path, dump(LOOP), dump(LOOP[:2], state="started"))])
    [found] = result.runs[0].divergences
    assert (found.kind, found.ahead, found.behind, found.call) == ("never came", (0,), (1,), 3)


def test_sends_meet_receives(tmp_path):
    def p2p(name, **changes):
        return ("x", "a.py:1", {"profiling_name": f"nccl:{name}", "is_p2p": True, **changes})

    first, second = p2p("send 0->1", output_sizes=[]), p2p("recv 1<-0", input_sizes=[])
    assert not check([write(tmp_path, dump([first, A]), dump([A, second]))]).diverges
    result = check([write(tmp_path, dump([first, A, first]), dump([A, second]))])
    [found] = result.runs[0].divergences
    assert (str(found.stream), found.kind) == ("sends 0 -> 1 in group '0' (ranks 0, 1)", "never came")


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_0", 0), ("comm_lib_trace_rank_17", 17), ("3.json", 3), ("x_12.pkl", 12), ("2.pickle", 2)],
)
def test_rank_of_a_name(tmp_path, name, rank):
    assert rank_of_name(tmp_path / name) == rank


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b'{"version": "2.10"}', "version, pg_config and entries", id="other-json"),
        pytest.param(b'{"version"', "Expecting", id="cut-json"),
        pytest.param(pickle.dumps([1]), "version, pg_config and entries", id="other-pickle"),
        pytest.param(pickle.dumps(dump([A]))[:-30], "not a whole pickle", id="cut-pickle"),
        pytest.param(
            pickle.dumps({"version": "1", "pg_config": {}, "entries": [{"record_id": 0}]}),
            "another form",
            id="old-form",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, content, reason):
    (tmp_path / "rank_0").write_bytes(content)
    with pytest.raises(InputError, match=reason):
        read_dump(tmp_path / "rank_0")
    (tmp_path / "trace").write_bytes(pickle.dumps(dump([A])))
    with pytest.raises(InputError, match="ends in its rank"):
        read_dump(tmp_path / "trace")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".json"], ids=["pickle", "json"])
def test_dumps_that_torch_made(recorded, suffix):
    files = {scene: [recorded / f"dumps-{scene}" / f"rank_{rank}{suffix}" for rank in (0, 1)] for scene in SCENES}
    history, remarks = read_dump(files["whole"][0])
    calls = sorted((one for calls in history.calls.values() for one in calls.values()), key=lambda one: one.order)
    entered = [(one.op, one.dtypes, one.sizes) for one in calls]
    assert remarks == [] and entered[:12] == [("all_reduce", ("Float",), (4,))] * 12
    assert not check(files["whole"]).diverges
    skipped = check(files["skip"]).runs[0].divergences
    assert skipped
    if not suffix:  # the JSON form has no frames
        line = next(i for i, text in enumerate(PROGRAM.read_text().splitlines(), 1) if "rank 1 skips" in text)
        assert (skipped[0].kind, skipped[0].odd) == ("missing call", (1,))
        assert skipped[0].said[0].entered.site.startswith(f"consistency/program.py:{line}")
