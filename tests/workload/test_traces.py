"""Every format through small files made here: what is read, what is refused and how, what skip_bad counts."""

import gzip
import json
from pathlib import Path

import pytest

from cpkit.errors import InputError
from cpkit.workload import Request, Trace, read_trace

EXCERPT = Path(__file__).parents[2] / "examples" / "data" / "conversation_excerpt.jsonl.gz"

ROW = {"timestamp": 1500, "input_length": 1000, "output_length": 20, "hash_ids": [4, 9]}
GOOD = json.dumps(ROW)
PLAIN = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,7\n"
LENGTHS = (
    "session,branch,turn,t_s,input_tokens,output_tokens,hash_blocks,prefix_blocks_of_previous_turn,api_time_s,"
    "think_time_s\n"
)


@pytest.fixture
def written(tmp_path):
    def write(content, name="trace", packed=False):
        path = tmp_path / name
        data = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(gzip.compress(data) if packed else data)
        return path

    return write


def row(**changes):
    return json.dumps({**ROW, **changes})


SAMPLES = {
    "hash-blocks": GOOD + "\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
    "plain": PLAIN,
    "agentic-lengths": LENGTHS + "s,main,0,0.0,100,5,1,,1.0,0.0\n",
    "agentic-sessions": json.dumps({"id": "s", "block_size": 64, "requests": [{"t": 0, "in": 9, "out": 1}]}),
    "clients": json.dumps(
        [
            {
                "dataset": {"0": {"input_tokens": "{5: 1.0}", "output_tokens": "{6: 1.0}"}},
                "trace_csv": "0,0.01,1,Gamma,1,1\r\n100,0,0,,0,0",
            }
        ]
    ),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain-file", "gz"])
@pytest.mark.parametrize("name", SAMPLES)
def test_format_is_told_by_content(written, name, packed):
    # Names that say something else.
    trace = read_trace(written(SAMPLES[name], "x.csv" if packed else "x.json.gz", packed))
    assert trace.format == name
    assert len(trace.requests) == 1


def test_byte_order_mark_blank_lines_and_crlf_are_no_trouble(written):
    trace = read_trace(written(b"\xef\xbb\xbf\r\n" + PLAIN.replace("\n", "\r\n\r\n").encode()))
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in trace.requests] == [(0.5, 100, 7)]


BAD_LINES = {
    "truncated": (GOOD[:40], "not JSON"),
    "not-an-object": ("[1, 2]", "list where an object"),
    "missing-field": ('{"timestamp": 1, "input_length": 5}', "no field 'output_length'"),
    "negative": (row(input_length=-5), "input_length=-5"),
    "fraction": (row(output_length=2.5), r"output_length=2\.5 is not a whole number"),
    "boolean": (row(output_length=True), "output_length=True is not a number"),
    "text": (row(input_length="many"), "input_length='many' is not a number"),
    "nan": (GOOD.replace("20", "NaN"), "NaN is not a number"),
    "infinity": (GOOD.replace("20", "-Infinity"), "-Infinity is not a number"),
    "overflowing-float": (GOOD.replace("20", "1e999"), "output_length=inf"),
    "above-2^53": (row(input_length=2**53 + 1), "from 0 to 2\\^40"),
    "above-64-bits": (row(input_length=10**30), "more than 64 bits"),
    "endless-digits": (GOOD.replace("1000", "9" * 5000), "digits"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "hash-text": (row(hash_ids="4 9"), "hash_ids="),
    "too-many-hashes": (row(input_length=1), "no block size fits"),
    "time-text": (row(timestamp="noon"), "timestamp='noon' is not a number"),
    "time-negative": (row(timestamp=-1), "timestamp=-1"),
    "time-huge": (row(timestamp=1e300), r"timestamp=1e\+300"),
    "time-back": (row(timestamp=1499), "timestamp steps back"),
    "chat-list": (row(chat_id=[1]), "chat_id="),
    "not-utf8": (b'{"timestamp": "\xff"}', "not UTF-8"),
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_line_is_named_or_counted(written, line, reason):
    raw = line if isinstance(line, bytes) else line.encode()
    path = written(b"\n".join([GOOD.encode(), b"", raw, GOOD.encode()]))
    with pytest.raises(InputError, match=rf"trace, line 3: .*{reason}"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.requests), trace.num_skipped) == (2, 1)


def test_bad_first_line_does_not_hide_the_format(written):
    path = written("{oops\n" + GOOD)
    with pytest.raises(InputError, match=r"line 1: not JSON"):
        read_trace(path)
    assert read_trace(path, skip_bad=True).num_skipped == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("0.5,100", "2 values for 3 columns"),
        ("0.5,100,7,8", "4 values for 3 columns"),
        ("0.4,100,7", "arrived_at steps back"),
        ("nan,100,7", "arrived_at='nan'"),
        ("0.5,1.5,7", r"num_prefill_tokens=1\.5"),
        ("0.5,,7", "num_prefill_tokens='' is not a number"),
        ("0.5,100,-7", "num_decode_tokens=-7"),
        ("1e400,100,7", "arrived_at="),
        ("0.5,100\r0.6,7", "not CSV: new-line character"),
        pytest.param("0.5,100," + "7" * 140_000, "not CSV: field larger", id="cell-above-128-KiB"),
    ],
)
def test_bad_csv_line_is_named_or_counted(written, line, reason):
    path = written(PLAIN + line + "\n1,5,5\n")
    with pytest.raises(InputError, match=f"line 3: .*{reason}"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert ([r.prompt_len for r in trace.requests], trace.num_skipped) == ([100, 5], 1)


def test_whole_floats_and_other_columns_are_read(written):
    text = "num_decode_tokens,x,arrived_at,num_prefill_tokens\n3.0,?,2,16777216.0\n"
    (only,) = read_trace(written(text)).requests
    assert (only.arrival_s, only.prompt_len, only.output_len) == (2.0, 1 << 24, 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "empty trace"),
        ("\n \n", "empty trace"),
        (PLAIN.splitlines()[0], "empty trace"),
        ("[]", "empty trace"),
        ("a,b\n1,2\n", "starts no known trace"),
        ('{"prompt": "hi"}', "no record of a known trace"),
        ("[1", "not JSON"),
        (b"\x00\x01\xff", "starts no known trace"),
        (PLAIN.replace("\n", "\r"), "line 1: not CSV: new-line character"),
    ],
    ids=[
        "no-bytes",
        "blank",
        "header-alone",
        "no-clients",
        "other-csv",
        "other-json",
        "cut-array",
        "binary",
        "old-mac",
    ],
)
@pytest.mark.parametrize("skip_bad", [False, True], ids=["strict", "skip-bad"])
def test_files_without_a_trace_are_refused(written, content, reason, skip_bad):
    with pytest.raises(InputError, match=reason):
        read_trace(written(content), skip_bad=skip_bad)


def test_all_lines_bad_is_an_empty_trace(written):
    with pytest.raises(InputError, match="no request; 2 lines could not be read"):
        read_trace(written(row(input_length=-1) + "\n" + row(timestamp=-1)), skip_bad=True)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(InputError, match="none: No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(InputError, match="directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize("damage", ["early", "flipped", "at-once"])
def test_damaged_gz_keeps_what_could_be_unpacked(tmp_path, damage):
    lines = "\n".join(row(timestamp=1500 + i, hash_ids=[i * i % 977, i]) for i in range(3000)) + "\n"
    data = bytearray(gzip.compress(lines.encode()))
    if damage == "early":
        del data[-len(data) // 3 :]
    elif damage == "at-once":
        del data[12:]
    else:
        data[-6] ^= 255
    path = tmp_path / "trace.gz"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"trace.gz, line \d+: .*(ends early|damaged)"):
        read_trace(path)
    if damage == "at-once":
        with pytest.raises(InputError, match="empty trace"):
            read_trace(path, skip_bad=True)
        return
    trace = read_trace(path, skip_bad=True)
    assert trace.num_skipped == 1
    assert len(trace.requests) > 1000


def test_the_line_that_a_gz_ends_in_is_never_read(written, tmp_path):
    """Cut behind any byte: only requests that stand there in full come out; `1,2,34` of `1,2,345` looks whole too."""
    whole = [100 + 11 * i for i in range(40)]
    packed = gzip.compress(PLAIN.encode() + b"".join(b"1,2,%d\n" % n for n in whole), compresslevel=0)
    for size in range(len(packed) - 200, len(packed)):
        path = tmp_path / "trace.gz"
        path.write_bytes(packed[:size])
        trace = read_trace(path, skip_bad=True)
        read = [request.output_len for request in trace.requests[1:]]
        assert read == whole[: len(read)] and trace.num_skipped == 1


def test_limit_reads_no_further(written):
    path = written(GOOD + "\n" + GOOD + "\n{broken")
    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(InputError, match="limit=0"):
        read_trace(path, limit=0)


def test_traces_are_checked_on_their_own():
    with pytest.raises(InputError, match="has req_id 5"):
        Trace("made", "made", (Request(5, 0.0, 1, 1),))
    with pytest.raises(InputError, match="depends on 0"):
        Trace("made", "made", (Request(0, 0.0, 1, 1, depends_on=0),))


@pytest.mark.parametrize(
    "bad", [{"prompt_len": -1}, {"output_len": 1 << 41}, {"arrival_s": -0.5}, {"think_time_s": float("nan")}]
)
def test_requests_are_checked_on_their_own(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        Request(**{"req_id": 0, "arrival_s": 0.0, "prompt_len": 1, "output_len": 1, **bad})


@pytest.mark.skipif(not EXCERPT.exists(), reason="the example trace is not here")
def test_shipped_excerpt_is_read_whole():
    lines = gzip.decompress(EXCERPT.read_bytes()).decode().splitlines()
    trace = read_trace(EXCERPT)
    assert trace.notes == ("a hash stands for 512 tokens",)
    assert len(trace.requests) == len(lines)
    for request, line in zip(trace.requests, map(json.loads, lines), strict=True):
        assert request.prompt_len == line["input_length"]
        assert len(request.block_hashes) == len(line["hash_ids"])
