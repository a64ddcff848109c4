"""A pickle that would run something is refused before it does."""

import collections
import os
import pickle

import pytest

from cpkit.consistency.safe_pickle import load_plain
from cpkit.errors import InputError


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_plain_data_comes_through():
    value = {"a": [1, -1, 1 << 70, 1.5, None, True, "x", ("t", ()), {"deep": [[]]}]}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert load_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_is_refused_unrun(tmp_path, protocol):
    mark = tmp_path / "ran"
    for payload in (Runs(mark), {"entries": [Runs(mark)]}):
        data = pickle.dumps(payload, protocol)
        with pytest.raises(InputError, match=r"asks for (posix|nt)\.system"):
            load_plain(data)
    assert not mark.exists()
    pickle.loads(data)  # the payload is a real one
    assert mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pickle.dumps(collections.OrderedDict(a=1)), id="harmless-class"),
        pytest.param(b"cbuiltins\neval\n(S'1'\ntR.", id="eval"),
        pytest.param(b"(S'1'\nibuiltins\neval\n.", id="inst-opcode"),
        pytest.param(b"\x80\x02\x82\x01.", id="extension-registry"),
        pytest.param(b"Pmodule\n.", id="persistent-id"),
        pytest.param(b"", id="empty"),
        pytest.param(pickle.dumps([1] * 99)[:-9], id="cut-off"),
        pytest.param(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", id="huge-frame"),
        pytest.param(bytes(range(256)), id="noise"),
        pytest.param(b"\x80\x02]r\xff\xff\xff\x7f.", id="memo-of-gigabytes"),
        pytest.param(b"]p9999999999\n.", id="memo-of-gigabytes-as-text"),
    ],
)
def test_all_else_is_refused(data):
    with pytest.raises(InputError):
        load_plain(data)


def test_buffers_outside_the_pickle_are_refused():
    with pytest.raises(InputError):
        load_plain(pickle.dumps(pickle.PickleBuffer(b"x"), 5, buffer_callback=lambda _: None))
