"""One step's requests, decodes first, then prefills."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpkit.arrays import BoolArray, Int32Array, IntArray, as_ints, as_lens, freeze, prefix_sum
from cpkit.errors import InputError, PlanError

FORMAT = "cpkit-batch-1"


@dataclass(frozen=True, eq=False)
class Batch:
    """Requests of one step: lengths in tokens, and where their KV lives.

        request        seq_len  query_len      computed before   this step
        0 (decode)           9          1      0 1 ... 7         8
        1 (prefill)          6          4      0 1               2 3 4 5

    seq_lens, query_lens, prompt_lens: [num_reqs] int64; seq_lens include this step's query tokens. A request is a
        decode once its whole prompt was computed before this step, whatever its query length.
    block_tables: [num_reqs, max_blocks] int32, the KV block of each virtual block (0: the null block), or None.
    req_ids: [num_reqs] int64, the caller's names; 0, 1, ... if not given.
    Raises PlanError.
    """

    seq_lens: IntArray
    query_lens: IntArray
    prompt_lens: IntArray
    block_tables: Int32Array | None
    req_ids: IntArray

    def __post_init__(self) -> None:
        for name in ("seq_lens", "query_lens", "prompt_lens"):
            object.__setattr__(self, name, as_lens(name, getattr(self, name), PlanError))
        object.__setattr__(self, "req_ids", freeze(as_ints("req_ids", self.req_ids, PlanError)))
        counts = {name: len(getattr(self, name)) for name in ("seq_lens", "query_lens", "prompt_lens", "req_ids")}
        if len(set(counts.values())) != 1:
            raise PlanError(f"lists of different lengths {counts}: each has one entry a request")
        short = np.flatnonzero(self.seq_lens < self.query_lens)
        if short.size:
            i = int(short[0])
            raise PlanError(
                f"request {i}: seq_len={int(self.seq_lens[i])} < query_len={int(self.query_lens[i])}: seq_len counts "
                "the context with this step's query tokens included"
            )
        if (np.diff(self.is_prefilling.view(np.int8)) < 0).any():
            i = int(np.flatnonzero(np.diff(self.is_prefilling.view(np.int8)) < 0)[0]) + 1
            raise PlanError(f"request {i} is a decode behind a prefill: put decodes first (Batch.from_lens sorts them)")
        if self.block_tables is not None:
            self._check_block_tables(self.block_tables)
            object.__setattr__(self, "block_tables", freeze(self.block_tables))

    @classmethod
    def from_lens(
        cls,
        seq_lens: Sequence[int] | npt.ArrayLike,
        query_lens: Sequence[int] | npt.ArrayLike,
        prompt_lens: Sequence[int] | npt.ArrayLike | None = None,
        *,
        block_tables: Sequence[Sequence[int]] | npt.ArrayLike | None = None,
        req_ids: Sequence[int] | npt.ArrayLike | None = None,
    ) -> "Batch":
        """A batch from lengths in any order; prefills move behind the decodes, otherwise the order is kept.

        Without prompt_lens, one query token behind some context is a decode, and every other request a prefill that
        ends its prompt with this step. block_tables: a row of block ids a request, rows may differ in length.
        """
        seq = as_lens("seq_lens", seq_lens, PlanError)
        query = as_lens("query_lens", query_lens, PlanError)
        if len(seq) != len(query):
            raise PlanError(f"{len(seq)} seq_lens and {len(query)} query_lens: each has one entry a request")
        if prompt_lens is None:
            prompt = np.where((query == 1) & (seq > 1), seq - 1, seq)
        else:
            prompt = as_lens("prompt_lens", prompt_lens, PlanError)
        ids = np.arange(len(seq)) if req_ids is None else as_ints("req_ids", req_ids, PlanError)
        tables = None if block_tables is None else pad_block_tables(block_tables)
        if len(prompt) == len(seq) == len(ids) and (tables is None or len(tables) == len(seq)):
            prefilling = seq - query < prompt
            if (prefilling[:-1] & ~prefilling[1:]).any():
                order = np.argsort(prefilling, kind="stable")
                seq, query, prompt, ids = seq[order], query[order], prompt[order], ids[order]
                tables = None if tables is None else tables[order]
        return cls(seq, query, prompt, tables, ids)

    @property
    def num_reqs(self) -> int:
        """Requests of the step, those without tokens included."""
        return len(self.seq_lens)

    @cached_property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return int(self.query_lens.sum())

    @cached_property
    def num_computed(self) -> IntArray:
        """[num_reqs] int64, tokens computed before this step."""
        return freeze(self.seq_lens - self.query_lens)

    @cached_property
    def is_prefilling(self) -> BoolArray:
        """[num_reqs], the prompt was not complete before this step."""
        return freeze(self.num_computed < self.prompt_lens)

    @cached_property
    def num_decodes(self) -> int:
        """Leading requests that are past their prompt."""
        return self.num_reqs - int(np.count_nonzero(self.is_prefilling))

    @cached_property
    def query_start_loc(self) -> IntArray:
        """[num_reqs + 1] int64, each request's first token in the flat batch, then the total."""
        return freeze(prefix_sum(self.query_lens))

    def positions(self) -> IntArray:
        """[num_tokens] int64, place of each flat token in its own request."""
        token = np.arange(self.num_tokens)
        return token + np.repeat(self.num_computed - self.query_start_loc[:-1], self.query_lens)

    def _check_block_tables(self, tables: Int32Array) -> None:
        if tables.ndim != 2 or len(tables) != self.num_reqs or tables.dtype != np.int32:
            raise PlanError(
                f"block_tables is {tables.dtype} of shape {tables.shape} for {self.num_reqs} requests: it is int32, "
                "one row a request"
            )
        if tables.size and tables.min() < 0:
            raise PlanError(f"block_tables holds {int(tables.min())}: block ids start at 0, the null block")

    def to_json(self) -> dict[str, Any]:
        """Plain lists under stable names; from_json gives the same batch back."""
        data: dict[str, Any] = {"format": FORMAT}
        for name in ("req_ids", "seq_lens", "query_lens", "prompt_lens"):
            data[name] = getattr(self, name).tolist()
        if self.block_tables is not None:
            data["block_tables"] = self.block_tables.tolist()
        return data

    @classmethod
    def from_json(cls, data: Any) -> "Batch":
        """A batch from to_json's dictionary, or from hand-written seq_lens and query_lens; raises PlanError."""
        known = {"format", "req_ids", "seq_lens", "query_lens", "prompt_lens", "block_tables"}
        if not isinstance(data, dict) or not {"seq_lens", "query_lens"} <= data.keys():
            raise PlanError('a batch is a JSON object with "seq_lens" and "query_lens" (and optionally "prompt_lens")')
        if unknown := sorted(data.keys() - known):
            raise PlanError(f"unknown fields {unknown}: a batch has {sorted(known)}")
        if data.get("format", FORMAT) != FORMAT:
            raise PlanError(f"format {data['format']!r}: this version reads {FORMAT!r}")
        return cls.from_lens(
            data["seq_lens"],
            data["query_lens"],
            data.get("prompt_lens"),
            block_tables=data.get("block_tables"),
            req_ids=data.get("req_ids"),
        )

    def save(self, path: Path | str) -> None:
        """Write to_json to a file."""
        Path(path).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Batch":
        """Read a batch file; raises InputError that names the file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            like = '{"seq_lens": [10, 9], "query_lens": [1, 7]}'
            raise InputError(f"{path}: not JSON ({error}): a batch file is like {like}") from error
        try:
            return cls.from_json(data)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: {error}") from error


def pad_block_tables(rows: Sequence[Sequence[int]] | npt.ArrayLike) -> Int32Array:
    """Rows of block ids as one [num_reqs, widest] int32 array, filled up with the null block 0; raises PlanError."""
    if isinstance(rows, np.ndarray):
        if rows.dtype.kind not in "iu" or rows.ndim != 2:
            raise PlanError(f"block_tables is a {rows.dtype} array of shape {rows.shape}: it takes 2-D whole numbers")
        ids = [rows.ravel()]
        table: npt.NDArray[Any] = rows
    else:
        if not isinstance(rows, Sequence) or not all(isinstance(row, Sequence | np.ndarray) for row in rows):
            raise PlanError("block_tables holds one list of block ids a request")
        ids = [as_ints(f"block_tables[{i}]", row, PlanError) for i, row in enumerate(rows)]
        table = np.zeros((len(ids), max(map(len, ids), default=0)), np.int64)
        for row, blocks in zip(table, ids, strict=True):
            row[: len(blocks)] = blocks
    for row in ids:
        outside = row[(row < 0) | (row > np.iinfo(np.int32).max)]
        if outside.size:
            raise PlanError(f"block_tables holds {int(outside[0])}: block ids are int32 and start at 0, the null block")
    return np.ascontiguousarray(table, np.int32)
