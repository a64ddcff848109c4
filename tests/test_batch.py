"""A batch checks itself, sorts decodes to the front, and survives its own JSON."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit.batch import FORMAT, Batch, pad_block_tables
from cpkit.errors import InputError, PlanError


@st.composite
def requests(draw):
    """(computed, new, prompt, blocks, id) of each request."""
    reqs = []
    for _ in range(draw(st.integers(0, 6))):
        computed, new = draw(st.integers(0, 50)), draw(st.integers(0, 9))
        prompt = draw(st.integers(0, computed + new))
        blocks = draw(st.lists(st.integers(0, (1 << 31) - 1), max_size=3))
        reqs.append((computed, new, prompt, blocks, draw(st.integers(-(1 << 63), (1 << 63) - 1))))
    return reqs


@given(reqs=requests())
def test_fields_follow_the_requests(reqs):
    batch = Batch.from_lens(
        [c + n for c, n, *_ in reqs],
        [n for _, n, *_ in reqs],
        [prompt for _, _, prompt, *_ in reqs],
        block_tables=[blocks for *_, blocks, _ in reqs],
        req_ids=[req_id for *_, req_id in reqs],
    )
    ordered = [req for req in reqs if req[0] >= req[2]] + [req for req in reqs if req[0] < req[2]]
    assert batch.req_ids.tolist() == [req_id for *_, req_id in ordered]
    assert batch.num_computed.tolist() == [computed for computed, *_ in ordered]
    assert batch.query_lens.tolist() == [new for _, new, *_ in ordered]
    assert batch.is_prefilling.tolist() == [computed < prompt for computed, _, prompt, *_ in ordered]
    assert batch.num_decodes == sum(computed >= prompt for computed, _, prompt, *_ in ordered)
    assert batch.positions().tolist() == [c + j for c, n, *_ in ordered for j in range(n)]
    assert batch.query_start_loc.tolist() == [sum(n for _, n, *_ in ordered[:i]) for i in range(len(reqs) + 1)]
    assert batch.num_tokens == sum(n for _, n, *_ in reqs)
    widest = max((len(blocks) for *_, blocks, _ in reqs), default=0)
    assert batch.block_tables.tolist() == [blocks + [0] * (widest - len(blocks)) for *_, blocks, _ in ordered]
    again = Batch.from_json(json.loads(json.dumps(batch.to_json())))
    for field in ("seq_lens", "query_lens", "prompt_lens", "req_ids", "block_tables"):
        mine, read = getattr(batch, field), getattr(again, field)
        assert mine.dtype == read.dtype and mine.shape[:1] == read.shape[:1] and mine.tolist() == read.tolist()
        assert not read.flags.writeable


@pytest.mark.parametrize(
    ("seq_len", "query_len", "prefilling"),
    [
        pytest.param(9, 1, False, id="one-token-behind-a-context"),
        pytest.param(1, 1, True, id="one-token-prompt"),
        pytest.param(9, 2, True, id="two-tokens"),
        pytest.param(9, 9, True, id="whole-prompt"),
        pytest.param(9, 0, False, id="no-tokens"),
        pytest.param(0, 0, False, id="nothing"),
    ],
)
def test_without_prompt_lens_one_token_is_a_decode(seq_len, query_len, prefilling):
    assert Batch.from_lens([seq_len], [query_len]).is_prefilling.tolist() == [prefilling]


def test_sorting_keeps_the_order_within_decodes_and_prefills():
    query = [1, 9] * 40
    ids = Batch.from_lens([20] * 80, query).req_ids.tolist()
    assert ids == [*range(0, 80, 2), *range(1, 80, 2)]


def test_b73_context_leaves_this_steps_tokens_out():
    assert Batch.from_lens([19], [3], [16]).num_computed.tolist() == [16]


def test_callers_arrays_are_copied():
    seq, tables = np.array([5, 6]), np.array([[1, 2], [3, 4]], np.int32)
    batch = Batch.from_lens(seq, [1, 1], block_tables=tables)
    seq[0] = tables[0, 0] = 99
    assert (batch.seq_lens.tolist(), batch.block_tables.tolist()) == ([5, 6], [[1, 2], [3, 4]])


def test_far_lengths_keep_64_bits():
    batch = Batch.from_lens([1 << 40, 16_000_000], [(1 << 31) + 1, 16_000_000])
    assert batch.num_tokens == (1 << 31) + 16_000_001
    assert batch.num_computed.tolist() == [(1 << 40) - (1 << 31) - 1, 0]


@pytest.mark.parametrize(
    ("lens", "options", "words"),
    [
        pytest.param(
            ([3], [4]), {}, "request 0: seq_len=3 < query_len=4: seq_len counts the context with", id="short-seq"
        ),
        pytest.param(([3, 4], [1]), {}, "2 seq_lens and 1 query_lens: each has one entry a request", id="counts"),
        pytest.param(([3], [1], [3, 4]), {}, r"different lengths \{.*'prompt_lens': 2", id="prompt-count"),
        pytest.param(([3], [1]), {"req_ids": [1, 2]}, r"different lengths \{.*'req_ids': 2", id="id-count"),
        pytest.param(([-3], [0]), {}, r"seq_lens\[0\]=-3: a length is between", id="negative"),
        pytest.param(([3], [1.0]), {}, r"query_lens holds 1\.0", id="float"),
        pytest.param(([3], [True]), {}, "query_lens holds True", id="bool"),
        pytest.param(([float("nan")], [1]), {}, "seq_lens holds nan", id="nan"),
        pytest.param(([10**80], [1]), {}, "seq_lens holds 10000", id="huge"),
        pytest.param(([(1 << 40) + 1], [1]), {}, r"between 0 and 2\^40", id="above-2^40"),
        pytest.param(
            ([3], [1]),
            {"block_tables": [[1], [2]]},
            r"shape \(2, 1\) for 1 requests: it is int32, one row a",
            id="rows",
        ),
        pytest.param(
            ([3], [1]), {"block_tables": [[1, -1]]}, "block_tables holds -1: .*start at 0", id="negative-block"
        ),
        pytest.param(([3], [1]), {"block_tables": [[-(1 << 32)]]}, "holds -4294967296", id="negative-block-that-wraps"),
        pytest.param(([3], [1]), {"block_tables": [[1 << 31]]}, "holds 2147483648: .*int32", id="block-above-int32"),
        pytest.param(([3], [1]), {"block_tables": np.array([[1 << 32]])}, "holds 4294967296", id="array-that-wraps"),
        pytest.param(([3], [1]), {"block_tables": [[1.5]]}, r"block_tables\[0\] holds 1\.5", id="float-block"),
        pytest.param(([3], [1]), {"block_tables": [[True, 2]]}, r"block_tables\[0\] holds True", id="bool-block"),
        pytest.param(([3], [1]), {"block_tables": [5]}, "one list of block ids a request", id="flat-blocks"),
        pytest.param(([3], [1]), {"block_tables": ["12"]}, "block_tables", id="string-blocks"),
        pytest.param(
            ([3], [1]), {"block_tables": np.array([1.0])}, "float64 array .*2-D whole numbers", id="float-array"
        ),
    ],
)
def test_contradictions_are_refused(lens, options, words):
    with pytest.raises(PlanError, match=words):
        Batch.from_lens(*lens, **options)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        pytest.param("seq_lens", np.array([-1]), r"seq_lens\[0\]=-1", id="negative"),
        pytest.param("query_lens", np.array([0.5]), r"query_lens holds 0\.5", id="float"),
        pytest.param("req_ids", np.array([True]), "req_ids holds True", id="bool-id"),
        pytest.param(
            "block_tables", np.array([[1]]), r"block_tables is int64 of shape \(1, 1\) .*int32", id="wide-table"
        ),
    ],
)
def test_the_constructor_checks_too(field, value, words):
    one = np.array([1])
    fields = {"seq_lens": one, "query_lens": one, "prompt_lens": one, "req_ids": one, "block_tables": None}
    with pytest.raises(PlanError, match=words):
        Batch(**(fields | {field: value}))
    batch = Batch(**fields)
    one[0] = 7
    assert batch.seq_lens.tolist() == [1]


def test_decode_behind_a_prefill_names_the_way_out():
    ok = Batch.from_lens([4, 9], [1, 9])
    fields = {name: getattr(ok, name)[::-1] for name in ("seq_lens", "query_lens", "prompt_lens", "req_ids")}
    with pytest.raises(PlanError, match="request 1 is a decode behind a prefill: put decodes first"):
        Batch(**fields, block_tables=None)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param([], 'JSON object with "seq_lens" and "query_lens"', id="list"),
        pytest.param(None, "JSON object", id="null"),
        pytest.param({"seq_lens": [1]}, "JSON object", id="no-query-lens"),
        pytest.param(
            {"seq_lens": [1], "query_lens": [1], "query_len": [1]},
            r"unknown fields \['query_len'\]: a batch has",
            id="unknown-field",
        ),
        pytest.param(
            {"seq_lens": [1], "query_lens": [1], "format": "v0"}, "format 'v0': this version reads", id="format"
        ),
        pytest.param({"seq_lens": 1, "query_lens": [1]}, "seq_lens has 0 dimensions", id="scalar"),
        pytest.param({"seq_lens": [[1]], "query_lens": [1]}, "seq_lens has 2 dimensions", id="nested"),
        pytest.param(
            {"seq_lens": [1], "query_lens": [1], "block_tables": {}}, "one list of block ids", id="blocks-object"
        ),
    ],
)
def test_json_that_is_no_batch(data, words):
    with pytest.raises(PlanError, match=words):
        Batch.from_json(data)


def test_hand_written_json_needs_two_lists():
    batch = Batch.from_json({"seq_lens": [9, 4], "query_lens": [9, 1]})
    assert (batch.seq_lens.tolist(), batch.block_tables, batch.req_ids.tolist()) == ([4, 9], None, [1, 0])


def test_files(tmp_path):
    path = tmp_path / "batch.json"
    Batch.from_lens([9], [2], block_tables=[[7]]).save(path)
    assert json.loads(path.read_text())["format"] == FORMAT
    assert Batch.load(path).block_tables.tolist() == [[7]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "not JSON .*: a batch file is like", id="empty"),
        pytest.param(b'{"seq_lens": [1], "query', "Unterminated", id="cut-short"),
        pytest.param(b'\xff{"seq_lens": [1]}', "utf-8", id="not-utf-8"),
        pytest.param(b"[" * 100_000, "recursion", id="deep"),
        pytest.param(b'{"seq_lens": [NaN], "query_lens": [1]}', "seq_lens holds nan", id="nan"),
        pytest.param(b'{"seq_lens": [1e999], "query_lens": [1]}', "seq_lens holds inf", id="inf"),
        pytest.param(b'{"seq_lens": [' + b"9" * 5000 + b'], "query_lens": [1]}', "4300 digits", id="huge"),
        pytest.param(b'{"seq_lens": [9, [3]], "query_lens": [1]}', "seq_lens is ragged", id="ragged"),
        pytest.param(b'{"seq_lens": [2], "query_lens": [3]}', "seq_len=2 < query_len=3", id="short"),
    ],
)
def test_files_that_are_no_batch_are_named(tmp_path, content, words):
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"odd\.json: .*{words}"):
        Batch.load(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: No such file"):
        Batch.load(tmp_path / "none.json")


def test_tables_without_requests_or_columns():
    assert pad_block_tables([]).shape == (0, 0)
    assert pad_block_tables([[], []]).shape == (2, 0)
    assert pad_block_tables(np.zeros((2, 3), np.uint8)).dtype == np.int32
