"""Upstream's vectors through the kernels that spread rows over tokens, by both backends, on a GPU where there is one.

Builders and the kernels of slots and lengths: tests/test_golden_kernels.py. Not compared is what docs/compat.md says
that cpkit decides otherwise.
"""

import gzip
import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="kernels take torch tensors")
pytest.importorskip("triton")

from cpkit.kernels.backends import BACKENDS  # noqa: E402  (needs torch)
from cpkit.kernels.decode_lens import DecodeRows, flat_decodes  # noqa: E402
from cpkit.kernels.key_ranges import ChunkRows, KeyRanges, key_ranges_gathered, key_ranges_local  # noqa: E402
from cpkit.kernels.position_slots import (  # noqa: E402
    KeyBlocks,
    compact_shard_slots,
    gathered_slots,
    shard_slots,
)
from cpkit.kernels.swa_indices import WindowTokens, draft_swa_indices, swa_indices  # noqa: E402
from cpkit.topology import Shard  # noqa: E402
from tests.test_golden import FOLDER  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def vectors(*names):
    """One parameter a case, of the function whose name the file has; a folder without the file has none."""
    found = []
    for path in (FOLDER / f"{name}.jsonl.gz" for name in names):
        if path.exists():
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                _, *cases = map(json.loads, lines)
            found += [pytest.param(SimpleNamespace(**c["inputs"]), c["outputs"], id=c["case"]) for c in cases]
    return pytest.mark.parametrize(("case", "outputs"), found)


backends = pytest.mark.parametrize("backend", BACKENDS)


def i32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def table(values):
    return i32(values).view(len(values), len(values[0]) if values else 0)


def garbage(*size, dtype=torch.int32):
    return torch.full(size, -99, dtype=dtype, device=DEVICE)


@backends
@vectors("swa_indices_and_lens", "swa_indices_and_lens_replay", "dspark_noncausal_swa_indices")
def test_windows(case, outputs, backend):
    replay = getattr(case, "replay_start", None)
    tokens = WindowTokens(
        i32(case.query_start_loc),
        i32(case.seq_lens),
        i32(case.token_to_req),
        torch.tensor(case.is_valid, dtype=torch.bool, device=DEVICE),
        table(case.block_table),
        case.block_size,
        replay_start=None if replay is None else i32(replay),
    )
    width = getattr(case, "index_width", case.window_size)
    draft = replay is None and hasattr(case, "index_width")
    indices, lens = garbage(case.num_tokens, width), garbage(case.num_tokens)
    kernel = draft_swa_indices if draft else swa_indices
    options = {"window_size": case.window_size, "token_offset": case.token_offset, "backend": backend}
    kernel(tokens, indices=indices, lens=lens, **options)
    assert indices.tolist() == outputs["indices"]
    assert lens.tolist() == outputs["lens"]


@backends
@vectors("build_prefill_chunk_metadata")
def test_key_ranges(case, outputs, backend):
    ratio, first, stop = case.compress_ratio, case.row_start, case.row_stop
    for rank, want in enumerate(outputs["rank_results"]):
        if want is None:
            continue
        cu_seq_lens = want["cu_seq_lens"]
        if case.pcp_rows:
            req = case.pcp_rows["row_req_idx"]
            region = [cu_seq_lens[req.index(one)] for one in req]
            rows, shard, kernel = region, {}, key_ranges_gathered
        else:
            rows, kernel = want["local_cu_seq_lens"][:-1], key_ranges_local
            shard = {"dcp_size": case.dcp_world_size, "dcp_rank": rank, "interleave": case.interleave * ratio}
        chunk = ChunkRows(
            i32(case.query_start_loc[first : stop + 1]),
            i32(case.seq_lens[first:stop]),
            torch.tensor(rows, dtype=torch.int64, device=DEVICE),
            i32(cu_seq_lens),
        )
        num_tokens = want["token_end"] - want["token_start"]
        out = KeyRanges(garbage(num_tokens), garbage(num_tokens), garbage(want["total_seq_lens"]))
        kernel(chunk, token_start=want["token_start"], compress_ratio=ratio, **shard, out=out, backend=backend)
        assert out.key_start.tolist() == want["cu_seqlen_ks"]
        assert out.key_end.tolist() == want["cu_seqlen_ke"]
        assert out.key_rows.tolist() == want["token_to_seq"]


@backends
@vectors("indexer_decode_metadata_varlen")
def test_decode_rows(case, outputs, backend):
    num_rows, width = case.num_tokens, len(case.block_table[0])
    out = DecodeRows(garbage(num_rows, 1), *(garbage(num_rows) for _ in range(3)), garbage(num_rows, width))
    loc, lens = i32(case.query_start_loc[: case.num_reqs + 1]), i32(case.seq_lens[: case.num_reqs])
    flat_decodes(loc, lens, table(case.block_table[: case.num_reqs]), Shard(), out=out, backend=backend)
    assert out.seq_lens[:, 0].tolist() == outputs["out_seq_lens"][:num_rows]
    assert out.block_tables.tolist() == outputs["out_block_table"]
    assert out.query_lens.tolist() == outputs["decode_lens"]
    assert out.req.tolist() == outputs["indices"]


@backends
@vectors("convert_req_index_to_global_slot")
def test_positions_to_slots(case, outputs, backend):
    """Decode tokens in place and compacted; of prefill tokens the positions that upstream keeps.

    Upstream drops rows that the workspace has, and keeps rows behind a rank's part of it, which are no rows here.
    """
    positions, k = table(case.token_indices), len(case.token_indices[0]) if case.token_indices else 0
    mapping = None if case.idx_mapping is None else i32(case.idx_mapping)
    blocks = KeyBlocks(table(case.block_table), case.block_size, case.block_stride_rows, mapping)
    args = (positions, i32(case.req_id), blocks)
    prefill = case.prefill["request_ids"] if case.prefill else [-1] * len(case.req_id)
    size = (len(case.token_indices), k)
    for rank, want in enumerate(outputs["rank_in_place"]):
        out, front, counts = garbage(*size, dtype=torch.int64), garbage(*size), garbage(size[0])
        shard = Shard(dcp_size=case.dcp_world_size, dcp_rank=rank, interleave=case.interleave)
        shard_slots(*args, shard, out=out, backend=backend)
        compact_shard_slots(*args, shard, out=front, counts=counts, backend=backend)
        for token, slots in enumerate(want):
            if prefill[token] < 0:
                assert out[token].tolist() == slots
                kept = [slot for slot in slots if slot != -1]
                assert front[token].tolist() == kept + [-1] * (k - len(kept))
                assert counts[token] == len(kept) == outputs["rank_counts"][rank][token]
        if case.prefill and case.prefill["rank_stride"]:
            starts = i32([case.prefill["workspace_starts"][max(one, 0)] for one in prefill])
            stride = case.prefill["rank_stride"]
            gathered_slots(positions, starts, shard, rank_stride=stride, out=out, backend=backend)
            for token, slots in enumerate(want):
                for place, pos in enumerate(case.token_indices[token]):
                    if prefill[token] >= 0 and slots[place] != -1:
                        part_end = (pos // case.interleave % case.dcp_world_size + 1) * stride
                        assert out[token, place] == (slots[place] if slots[place] < part_end else -1)
