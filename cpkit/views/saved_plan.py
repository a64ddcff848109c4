"""Save a plan to an .npz file and read it back, without pickle and without planning again.

The file is a zip of numpy arrays (numpy.load opens it) and one JSON text:

    header          [bytes] uint8   UTF-8 JSON: what all ranks share (cpkit.views.plan_data.shared_data: digests,
                                    collectives, topology, budget, ...) without the batch, and under "ranks" each
                                    rank's place, num_decodes, chunks and gathers
    seq_lens, query_lens, prompt_lens, req_ids    [num_reqs] int64, and block_tables [num_reqs, width] int32 if known
    row_start       [ranks + 1] int64               first row of each saved rank in the arrays below
    row_req, row_start_pos, row_stride, row_num_tokens, row_seq_lens    [rows] int64      row_is_prefilling  [rows] bool
    stored_keys_R, new_keys_R     [ranks, num_reqs] int64, for each compress ratio R: keys held after the step, and new
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpkit.arrays import IntArray, freeze, prefix_sum
from cpkit.batch import Batch
from cpkit.digest import digest
from cpkit.errors import InputError, PlanError
from cpkit.planner.rows import Rows
from cpkit.step import StepPlan
from cpkit.views.materialize import shard_lens
from cpkit.views.plan_data import FORMAT, chunk_data, rank_place, shared_data

BATCH_FIELDS = ("seq_lens", "query_lens", "prompt_lens", "req_ids")
ROW_FIELDS = ("req", "start_pos", "stride", "num_tokens", "seq_lens", "is_prefilling")


@dataclass(frozen=True, slots=True, eq=False)
class SavedPlan:
    """A plan as read from a file.

    header: the JSON part; batch: the step; ranks: the ranks saved; arrays: all arrays under their names in the file.
    """

    header: dict[str, Any]
    batch: Batch
    ranks: tuple[int, ...]
    arrays: dict[str, npt.NDArray[Any]]

    def rows(self, rank: int) -> Rows:
        """The rows of a saved rank; raises PlanError when it was not saved."""
        if rank not in self.ranks:
            raise PlanError(f"rank {rank} is not in this file, which holds {list(self.ranks)}")
        i = self.ranks.index(rank)
        place = self.header["ranks"][i]
        start = self.arrays["row_start"]
        cut = slice(int(start[i]), int(start[i + 1]))
        fields = {name: freeze(self.arrays[f"row_{name}"][cut]) for name in ROW_FIELDS}
        return Rows(
            **fields,
            query_start_loc=freeze(prefix_sum(fields["num_tokens"])),
            num_decodes=place["num_decodes"],
        )


def save_plan(plan: StepPlan, path: Path | str) -> None:
    """Write a plan; equal plans give equal files. The name is taken as it is."""
    shared = shared_data(plan)
    del shared["batch"]
    shared["ranks"] = [
        {**rank_place(plan, rank), "num_decodes": rank.rows.num_decodes, **chunk_data(rank)} for rank in plan.ranks
    ]
    arrays: dict[str, npt.NDArray[Any]] = {
        "header": np.frombuffer(json.dumps(shared).encode(), np.uint8),
        "row_start": prefix_sum(np.array([len(rank.rows.req) for rank in plan.ranks], np.int64)),
    }
    arrays |= {name: getattr(plan.batch, name) for name in BATCH_FIELDS}
    if plan.batch.block_tables is not None:
        arrays["block_tables"] = plan.batch.block_tables
    for name in ROW_FIELDS:
        arrays[f"row_{name}"] = np.concatenate([getattr(rank.rows, name) for rank in plan.ranks])
    for ratio in plan.shards:
        lens = [shard_lens(plan, rank.dcp_rank, ratio) for rank in plan.ranks]
        arrays[f"stored_keys_{ratio}"] = np.stack([after for _, after in lens])
        arrays[f"new_keys_{ratio}"] = np.stack([after - before for before, after in lens])
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # no array is named like an option


def load_plan(path: Path | str) -> SavedPlan:
    """Read a saved plan; raises InputError when it is none, is damaged, or its batch is not the one it was made for."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: freeze(file[name]) for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
        if header["format"] != FORMAT:
            raise InputError(f"{path}: format {header['format']!r}: this version reads {FORMAT!r}")
        ranks = tuple(place["rank"] for place in header["ranks"])
        batch = Batch(**{name: _ints(arrays, name) for name in BATCH_FIELDS}, block_tables=arrays.get("block_tables"))
        digests = dict(header["digests"])
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # numpy, zipfile, zlib and tokenize each have errors of their own for damaged bytes
        raise InputError(f"{path}: not a saved plan ({type(error).__name__}: {error})") from error
    for name in (*BATCH_FIELDS, "block_tables"):
        if digest(getattr(batch, name)) != digests.get(name):
            raise InputError(f"{path}: {name} differs from what was planned: the file was changed, plan the step again")
    return SavedPlan(header, batch, ranks, arrays)


def _ints(arrays: dict[str, npt.NDArray[Any]], name: str) -> IntArray:
    array = arrays[name]
    if array.dtype != np.int64 or array.ndim != 1:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not int64[num_reqs]")
    return array
