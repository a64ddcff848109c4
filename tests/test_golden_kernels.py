"""Upstream's vectors through the Triton kernels: on a GPU where there is one, else through Triton's interpreter.

Functions with a kernel of their own are called; whole builds go through compat, with builders that run Triton. Where a
vector shows a trap of upstream, tests/test_golden.py compares compat with it, and the kernel refuses.
"""

import builtins
import gzip
import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="kernels take torch tensors")
pytest.importorskip("triton")

from cpkit.errors import PlanError  # noqa: E402  (needs torch)
from cpkit.kernels.compressed_slots import StateBlocks, compressed_slots  # noqa: E402
from cpkit.kernels.dcp_local_lens import dcp_local_lens  # noqa: E402
from cpkit.kernels.deinterleave import deinterleave_idx  # noqa: E402
from cpkit.kernels.gather_lens import gather_lens  # noqa: E402
from cpkit.kernels.tail_slots import tail_slots  # noqa: E402
from cpkit.kernels.token_to_req import BatchRows, token_to_req  # noqa: E402
from cpkit.topology import Shard  # noqa: E402
from tests.golden_adapters import ADAPTERS  # noqa: E402
from tests.golden_adapters.tensors import i32, i64, rows  # noqa: E402
from tests.test_golden import FOLDER, compare  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = {"backend": "triton"}
KERNELS = {}
BUILDS = ("indexer_build", "swa_build")


def kernel(function):
    """Register a call of the kernel behind the vectors that have the function's name."""
    KERNELS[function.__name__] = function
    return function


def garbage(*shape, dtype=torch.int64):
    return torch.full(shape, 77, dtype=dtype, device=DEVICE)


@kernel
def get_compressed_slot_mapping(case):
    return _compressed(case, case.slot_mapping, 1, 1, case.out_len)


@kernel
def get_compressed_slot_mapping_dcp(case):
    ranks = (_compressed(case, slots, case.dcp_world_size, case.interleave, None) for slots in case.rank_slot_mapping)
    return {"rank_slots": [rank["slots"] for rank in ranks]}


def _compressed(case, slots, dcp_size, interleave, out_len):
    out = garbage(out_len or case.num_tokens)
    compressed_slots(
        i64(slots).to(DEVICE)[: case.num_tokens],
        BatchRows(i32(case.query_start_loc).to(DEVICE), i32(case.seq_lens).to(DEVICE)),
        StateBlocks(rows(case.block_table).to(DEVICE), case.compress_ratio, case.block_size),
        Shard(dcp_size=dcp_size, interleave=interleave),
        out=out,
        **TRITON,
    )
    return {"slots": out[: case.num_tokens]} | ({"buffer": out} if out_len else {})


@kernel
def compute_kpool_tail_slot_mapping_null_block(case):
    slots, num_tokens = i64(case.slot_mapping).to(DEVICE), case.num_actual_tokens
    out = garbage(len(slots))
    tail_slots(
        slots,
        (i64(case.positions) if case.positions is not None else i64([0] * len(slots))).to(DEVICE),
        i32(case.query_start_loc).to(DEVICE)[: case.num_reqs + 1],
        rows(case.block_table).to(DEVICE)[: case.num_reqs],
        kpool=case.kpool,
        num_tokens=0 if case.positions is None else num_tokens,
        out=out,
        **TRITON,
    )
    return {"slots": out}


@kernel
def get_dcp_local_seq_lens(case):
    lens = i32(case.seq_lens).to(DEVICE)
    ranks = [garbage(*lens.shape, dtype=torch.int32) for _ in range(case.dcp_world_size)]
    for rank, out in enumerate(ranks):
        shard = {"dcp_size": case.dcp_world_size, "dcp_rank": rank, "interleave": case.interleave}
        dcp_local_lens(lens, **shard, out=out, **TRITON)
    return {"local_lens": torch.stack(ranks, dim=-1)}


@kernel
def dcp_localize_decode_seq_lens(case):
    outputs = {"rank_out": []}
    for rank in range(case.dcp_world_size):
        lens = i32(case.seq_lens).to(DEVICE)
        shard = {"dcp_size": case.dcp_world_size, "dcp_rank": rank, "interleave": case.interleave}
        dcp_local_lens(lens, **shard, out=lens, **TRITON)
        outputs["rank_out"].append(lens)
    return outputs


@kernel
def token_to_req_indices(case):
    out = garbage(case.num_tokens, dtype=torch.int32)
    token_to_req(i32(case.query_start_loc).to(DEVICE), num_mapped=case.mapped_tokens, out=out, **TRITON)
    return {"token_to_req": out}


@kernel
def prefill_gather_lens(case):
    some = slice(case.num_decodes, case.num_decodes + case.num_prefills)
    out = garbage(case.num_prefills, dtype=torch.int32)
    loc = i32(case.query_start_loc).to(DEVICE)[case.num_decodes :][: case.num_prefills + 1]
    gather_lens(loc, i32(case.seq_lens).to(DEVICE)[some], window_size=case.window_size, out=out, **TRITON)
    return {"gather_lens": out}


@kernel
def build_pcp_global_chunk_plan(case):
    start, last = [0], None
    for req, shard_rows in zip(case.row_req_idx, case.row_shard_rows, strict=True):
        if req != last:
            start.append(start[-1] + shard_rows)
        last = req
    out = garbage(case.dcp_world_size * start[-1])
    place = {"dcp_size": case.dcp_world_size, "interleave": case.interleave}
    deinterleave_idx(i64(start).to(DEVICE), **place, out=out, **TRITON)
    return {"deinterleave_idx": out}


def read_cases(functions):
    for name in functions:
        path = FOLDER / f"{name}.jsonl.gz"
        if path.exists():
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                header, *cases = map(json.loads, lines)
            for case in cases:
                yield pytest.param(name, header["fields"], case["inputs"], case["outputs"], id=case["case"])


def test_the_folder_holds_vectors_of_kernels():
    assert list(read_cases(KERNELS)), f"{FOLDER} holds no vectors of {', '.join(KERNELS)}"


def is_planners(function, outputs):
    """A refusal of plan_gather, before any kernel; tests/test_golden.py has it."""
    return function == "build_pcp_global_chunk_plan" and "error" in outputs


@pytest.mark.parametrize(
    ("function", "fields", "inputs", "outputs"),
    [case for case in read_cases(KERNELS) if not is_planners(case.values[0], case.values[3])],
)
def test_vector(function, fields, inputs, outputs):
    call, case = KERNELS[function], SimpleNamespace(**inputs)
    if "error" in outputs:
        with pytest.raises(PlanError):
            call(case)
    else:
        for name, got in call(case).items():
            compare(name, got, outputs[name], fields)


@pytest.mark.parametrize(("function", "fields", "inputs", "outputs"), list(read_cases(BUILDS)))
def test_whole_build(monkeypatch, function, fields, inputs, outputs):
    if DEVICE == "cuda":
        pytest.skip("compat's builds are of CPU tensors; tests/gpu/check_builders.py compares builders on a GPU")
    from cpkit.builders import indexer, swa

    for module in (indexer, swa):
        monkeypatch.setattr(module, "choose_backend", lambda named, device: named or "triton")
    if "error" in outputs:
        with pytest.raises(getattr(builtins, outputs["error"])):
            ADAPTERS[function](SimpleNamespace(**inputs))
    else:
        compare(function, ADAPTERS[function](SimpleNamespace(**inputs)), outputs, fields)
