"""Logs as recorders leave them: whole, cut off, padded with zeros, of other forms."""

import json

import pytest

from cpkit.consistency.record_log import read_log
from cpkit.errors import InputError
from tests.consistency.ranks import LOOP, A, log_text

WHOLE = log_text(0, LOOP).encode()


def read(tmp_path, content):
    path = tmp_path / "log"
    path.write_bytes(content)
    return read_log(path)


def ops(history):
    return [entry.op for calls in history.calls.values() for entry in calls.values()]


def test_a_log_cut_off_anywhere_keeps_its_whole_lines(tmp_path):
    header = WHOLE.index(b"\n") + 1
    for stop in range(header, len(WHOLE) + 1):
        for zeros in (b"", b"\0" * 9) if stop % 8 == 0 else (b"",):
            history, remarks = read(tmp_path, WHOLE[:stop] + zeros)
            whole = WHOLE[:stop].count(b'"op"', 0, WHOLE.rfind(b"\n", 0, stop) + 1)
            assert ops(history) == [op for op, _ in LOOP][:whole]
            assert len(remarks) == (WHOLE[stop - 1 : stop] != b"\n")
            assert history.ended is (stop == len(WHOLE))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(WHOLE[:20], id="half-a-header"),
        pytest.param(b'{"format": "cpkit-record-9"}\n', id="other-format"),
        pytest.param(b'{"format": "cpkit-record-1"}\n', id="no-rank"),
        pytest.param(b"[]\n", id="no-object"),
        pytest.param(WHOLE + b"what\n", id="a-line-of-text"),
        pytest.param(WHOLE + b'{"group": 7, "seq": 1}\n', id="unknown-group"),
        pytest.param(WHOLE + b"[1]\n", id="a-line-of-numbers"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, content):
    with pytest.raises(InputError, match="log"):
        read(tmp_path, content)


def test_calls_that_cannot_be_laid_beside_others_are_counted(tmp_path):
    text = log_text(0, [A, ("recv_anysource", "a.py:1")]) + json.dumps({"group": 1, "name": "x", "ranks": None}) + "\n"
    call = json.loads(text.splitlines()[2]) | {"group": 1}
    history, remarks = read(tmp_path, f"{text}{json.dumps(call)}\n".encode())
    assert ops(history) == ["all_reduce"]
    assert [remark.split(": ")[1][:9] for remark in remarks] == ["1 calls o", "1 receive"]


def test_a_send_and_its_receive_are_one_stream(tmp_path):
    streams = []
    for rank, op in ((4, "send"), (7, "recv")):
        text = log_text(rank, [(op, "a.py:1", {"peer": 1 if op == "send" else 0})], ranks=(4, 7))
        history, _ = read(tmp_path, text.encode())
        streams += history.calls
    assert streams[0] == streams[1] and streams[0].ranks == (4, 7)
