"""Activations read from files: what was generated and saved comes back, and broken files are named."""

import json
import struct

import numpy as np
import pytest
import torch

from cpkit.activations.files import load_activations
from cpkit.activations.generate import Generated
from cpkit.errors import ConfigError, InputError

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_safetensors(path, tensors, header_extra=None):
    """The format by hand: length, JSON, bytes."""
    header, body = dict(header_extra or {}), b""
    for name, tensor in tensors.items():
        data = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def whole_file(source, num_positions):
    """Everything of two requests of one layer."""
    tensors = {}
    for req in (0, 4):
        at = torch.full((num_positions,), req), torch.arange(num_positions)
        tensors[f"query.1.{req}"] = source.heads("query", 1, *at, 6, range(4))
        tensors[f"latent.1.{req}"] = source.rows("latent", 1, *at, 8)
        tensors[f"index_weights.1.{req}"] = source.rows("index_weights", 1, *at, 4)
    return tensors


@pytest.fixture(params=["npz", "safetensors"])
def saved(request, tmp_path):
    source = Generated(9, "random")
    tensors = whole_file(source, 5)
    path = tmp_path / f"acts.{request.param}"
    if request.param == "npz":
        np.savez(path, **{name: tensor.float().numpy() for name, tensor in tensors.items()})
    else:
        write_safetensors(path, tensors, {"__metadata__": {"made_by": "a test"}})
    return source, load_activations(path)


def test_what_was_saved_comes_back(saved):
    source, loaded = saved
    req, position = torch.tensor([4, 0, 4, 0]), torch.tensor([2, 4, 0, 0])
    assert loaded.data == "random"
    for stream, dim in (("latent", 8), ("index_weights", 4)):
        got, want = (one.rows(stream, 1, req, position, dim) for one in (loaded, source))
        assert got.dtype == want.dtype and torch.equal(got, want)
    got, want = (one.heads("query", 1, req, position, 6, range(1, 3)) for one in (loaded, source))
    assert got.dtype == want.dtype and torch.equal(got, want)
    none = torch.zeros(0, dtype=torch.int64)
    assert loaded.rows("latent", 1, none, none, 8).shape == (0, 8)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        pytest.param(lambda a, i: a.rows("latent", 1, i + 1, i, 8), "no array 'latent.1.1'", id="request"),
        pytest.param(lambda a, i: a.rows("latent", 0, i, i, 8), "no array 'latent.0.0'", id="layer"),
        pytest.param(lambda a, i: a.rows("latent", 1, i, i + 5, 8), "positions 5 to 5", id="position"),
        pytest.param(lambda a, i: a.rows("latent", 1, i, i - 1, 8), "positions -1", id="negative-position"),
        pytest.param(lambda a, i: a.rows("latent", 1, i, i, 9), r"\[9\] values", id="dim"),
        pytest.param(lambda a, i: a.heads("query", 1, i, i, 6, range(3, 5)), r"\[2, 6\] values", id="heads"),
    ],
)
def test_what_the_file_does_not_hold(saved, ask, words):
    with pytest.raises(InputError, match=words):
        ask(saved[1], torch.zeros(1, dtype=torch.int64))


def test_streams_are_checked_as_in_the_generator(saved):
    at = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="'query'"):
        saved[1].rows("query", 1, at, at, 6)


def entry(**change):
    return {"latent.0.0": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]} | change}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param("a.npz", b"not a zip file", "not a readable .npz", id="npz-garbage"),
        pytest.param("a.npz", b"", "not a readable .npz", id="npz-empty"),
        pytest.param("a.safetensors", b"", "not a readable .safetensors", id="empty"),
        pytest.param("a.safetensors", struct.pack("<Q", 2) + b"[]", "not a readable", id="header-is-a-list"),
        pytest.param("a.safetensors", struct.pack("<Q", 99) + b"{", "not a readable", id="cut-off"),
        pytest.param("a.safetensors", entry(dtype="I64"), "'latent.0.0' is I64", id="whole-numbers"),
        pytest.param("a.safetensors", entry(shape=[3, 2]), "bytes 0 to 8 of 8", id="shape-is-not-its-bytes"),
        pytest.param("a.safetensors", entry(shape=[1, -1]), "bytes 0 to 8 of 8", id="negative-shape"),
        pytest.param("a.safetensors", entry(data_offsets=[0, 7]), "bytes 0 to 7 of 8", id="bytes-missing"),
        pytest.param("a.safetensors", entry(data_offsets=[-8, 0]), "bytes -8 to 0 of 8", id="in-the-header"),
        pytest.param("a.safetensors", entry(data_offsets=[8, 16]), "bytes 8 to 16 of 8", id="past-the-end"),
        pytest.param("a.pt", b"", r"\.npz or \.safetensors", id="other-kind"),
    ],
)
def test_broken_files(tmp_path, name, content, words):
    path = tmp_path / name
    if isinstance(content, dict):
        text = json.dumps(content).encode()
        text += b" " * (-len(text) % 8)
        content = struct.pack("<Q", len(text)) + text + bytes(8)
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        load_activations(path)


def test_missing_files_and_whole_number_arrays(tmp_path):
    with pytest.raises(InputError, match=r"missing\.npz"):
        load_activations(tmp_path / "missing.npz")
    np.savez(tmp_path / "ints.npz", **{"latent.0.0": np.arange(4)})
    with pytest.raises(InputError, match="int64"):
        load_activations(tmp_path / "ints.npz")


@pytest.mark.parametrize("name", ["absent.npz", "absent.safetensors"])
def test_absent_file(tmp_path, name):
    with pytest.raises(InputError, match=f"{name}: No such file or directory$"):
        load_activations(tmp_path / name)
