"""Activations from a file: .npz, or .safetensors (read here, without its library).

The file holds one array for each stream, layer and request, named as "latent.0.7" (stream, layer, request), with a row
for each position (or state):

    query.0.7, index_query.0.7      [positions, heads, dim]
    latent.0.7 and all others       [positions, dim]

Values are rounded to bf16, index_weights kept as fp32: what a generator gives. One file serves all ranks; each reads
the rows of its own tokens.
"""

import json
import math
import mmap
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cpkit.activations.generate import HEAD_STREAMS, check_stream
from cpkit.errors import InputError
from cpkit.kernels.checks import check_tensor

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Activations of a file, by name. Any values may be in it, so sums may round: data is random."""

    path: Path
    tensors: Mapping[str, torch.Tensor]
    data: str = "random"

    def rows(self, stream: str, layer: int, req: torch.Tensor, position: torch.Tensor, dim: int) -> torch.Tensor:
        """One vector a token, as Activations.rows; raises InputError for what the file does not hold."""
        check_stream(stream, HEAD_STREAMS, wanted=False)
        dtype = torch.float32 if stream == "index_weights" else torch.bfloat16
        return self._pick(stream, layer, req, position, (dim,), slice(None), dtype)

    def heads(
        self, stream: str, layer: int, req: torch.Tensor, position: torch.Tensor, dim: int, heads: range
    ) -> torch.Tensor:
        """Vectors of some heads, as Activations.heads; raises InputError for what the file does not hold."""
        check_stream(stream, HEAD_STREAMS, wanted=True)
        part = slice(heads.start, heads.stop)
        return self._pick(stream, layer, req, position, (len(heads), dim), part, torch.bfloat16)

    def _pick(
        self,
        stream: str,
        layer: int,
        req: torch.Tensor,
        position: torch.Tensor,
        shape: tuple[int, ...],
        part: slice,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        check_tensor("req", req, torch.int64, (None,), req.device)
        check_tensor("position", position, torch.int64, (len(req),), req.device)
        out = torch.empty(len(req), *shape, dtype=dtype, device=req.device)
        for one in sorted(set(req.tolist())):
            name = f"{stream}.{layer}.{one}"
            if name not in self.tensors:
                raise InputError(f"{self.path}: no array {name!r}; it holds {_some(self.tensors)}")
            tensor = self.tensors[name]
            mine = req == one
            wanted = position[mine]
            first, last = int(wanted.min()), int(wanted.max())
            rows = tensor[:, part] if tensor.dim() == 3 else tensor
            if tuple(rows.shape[1:]) != shape or first < 0 or last >= len(rows):
                raise InputError(
                    f"{self.path}: {name!r} is {list(tensor.shape)}: positions {first} to {last} of {list(shape)} "
                    "values are needed"
                )
            out[mine] = rows[wanted.to(rows.device)].to(out.device, dtype)
        return out


UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, zipfile.BadZipFile)
"""What the readers raise on a file that is not of its kind, or cut off."""


def load_activations(path: str | Path) -> Loaded:
    """The activations in a .npz or .safetensors file; raises InputError."""
    path = Path(path)
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise InputError(f"{path}: activations are read from {' or '.join(readers)} files")
    try:
        return Loaded(path, dict(readers[path.suffix](path)))
    except UNREADABLE as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"{path}: {error.strerror}") from error
        raise InputError(f"{path}: not a readable {path.suffix} file: {error}") from error


def _read_npz(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            array = arrays[name]
            if array.dtype.kind != "f":
                raise InputError(f"{path}: array {name!r} is {array.dtype}: activations are floating-point numbers")
            yield name, torch.from_numpy(array)


def _read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """8 bytes: length n of the header; n bytes of JSON: name -> dtype, shape, place; then the arrays' bytes."""
    with path.open("rb") as file:
        # a page is read when it is used; torch wants writable memory, so writes would go to a copy
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(memory[:8], "little")
    for name, entry in json.loads(memory[8:start]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            raise InputError(
                f"{path}: array {name!r} is {entry['dtype']}: it must be one of {', '.join(SAFETENSORS_DTYPES)}"
            )
        dtype, (first, last), shape = SAFETENSORS_DTYPES[entry["dtype"]], entry["data_offsets"], entry["shape"]
        size = math.prod(shape)
        if min([first, *shape]) < 0 or last - first != size * dtype.itemsize or start + last > len(memory):
            raise InputError(
                f"{path}: array {name!r} is {shape} of {entry['dtype']} at bytes {first} to {last} of "
                f"{len(memory) - start}: a place holds the array exactly and lies in the file; write the file anew"
            )
        flat = torch.frombuffer(memory, dtype=dtype, count=size, offset=start + first) if size else torch.empty(0)
        yield name, flat.view(shape)


def _some(tensors: Mapping[str, torch.Tensor]) -> str:
    names = sorted(tensors)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"
