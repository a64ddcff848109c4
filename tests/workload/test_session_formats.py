"""Session traces: turn order, think times, sub-agents, and which prefixes are shared."""

import json

import pytest

from cpkit.errors import InputError
from cpkit.workload import read_trace

HEADER = (
    "session,branch,turn,t_s,input_tokens,output_tokens,hash_blocks,prefix_blocks_of_previous_turn,api_time_s,"
    "think_time_s\n"
)


def turn(t, think=None, api=None, hashes=(1,), **more):
    entry = {"t": t, "type": "n", "in": 64 * len(hashes) + 1, "out": 3, "hash_ids": list(hashes), **more}
    return entry | ({} if think is None else {"think_time": think}) | ({} if api is None else {"api_time": api})


def write_sessions(tmp_path, *sessions):
    path = tmp_path / "trace"
    lines = [json.dumps({"id": f"s{i}", "block_size": 64, **session}) for i, session in enumerate(sessions)]
    path.write_text("\n".join(lines))
    return path


def outline(trace):
    return [(r.session, r.depends_on, r.think_time_s, r.arrival_s) for r in trace.requests]


def test_turns_wait_for_the_turn_before_and_sessions_start_at_zero(tmp_path):
    first = {"requests": [turn(100.0, think=9.0), turn(107.0, think=3.0), turn(120.0, api=4.0), turn(130.0)]}
    second = {"requests": [turn(0.0), turn(50.0, think=0.0)]}
    assert outline(read_trace(write_sessions(tmp_path, first, second))) == [
        ("s0", None, 0.0, 0.0),
        ("s0", 0, 3.0, 0.0),
        ("s0", 1, 13.0, 0.0),  # no think time: 120 - 107, as the call before has no recorded duration
        ("s0", 2, 6.0, 0.0),  # 130 - 120 - the 4 s of the call before
        ("s1", None, 0.0, 0.0),
        ("s1", 4, 0.0, 0.0),
    ]


def test_sub_agents_branch_off_the_turn_before_them(tmp_path):
    inner = {"t": 5.0, "type": "subagent", "requests": [turn(1.0, think=0.0)]}
    agent = {"t": 30.0, "type": "subagent", "requests": [turn(0.0, think=0.0, api=2.0), inner, turn(9.0, think=7.0)]}
    session = {"requests": [turn(0.0, api=8.0), agent, turn(60.0, think=52.0)]}
    assert outline(read_trace(write_sessions(tmp_path, session))) == [
        ("s0", None, 0.0, 0.0),
        ("s0", 0, 22.0, 0.0),  # the agent starts at 30, the call before ended at 8
        ("s0", 1, 4.0, 0.0),  # the inner agent: 5 - 2 s of call, and its first turn is 1 s into it
        ("s0", 1, 7.0, 0.0),
        ("s0", 0, 52.0, 0.0),
    ]


def test_a_session_may_begin_with_a_sub_agent(tmp_path):
    session = {"requests": [{"t": 10.0, "requests": [turn(2.0), turn(4.0, think=1.0)]}, turn(15.0)]}
    assert outline(read_trace(write_sessions(tmp_path, session))) == [
        ("s0", None, 0.0, 2.0),
        ("s0", 0, 1.0, 0.0),
        ("s0", None, 0.0, 5.0),
    ]


@pytest.mark.parametrize(("scope", "shared"), [("local", False), ("global", True)])
def test_hash_ids_belong_to_their_session_unless_global(tmp_path, scope, shared):
    session = {"hash_id_scope": scope, "requests": [turn(0.0, hashes=(5, 6)), turn(1.0, hashes=(5, 6, 7))]}
    a, b, c, _ = (r.block_hashes.tolist() for r in read_trace(write_sessions(tmp_path, session, session)).requests)
    assert a == b[:2]
    assert (a == c) == shared


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        (3, "requests is not a list"),
        ([turn(5.0), turn(4.0)], r"requests\[1\]: t steps back"),
        ([turn(0.0) | {"in": -1}], r"requests\[0\]: in=-1"),
        ([{"t": 0.0, "requests": [{"t": 1.0}]}], r"requests\[0\].requests\[0\]: no field 'in'"),
        ([{"t": 0.0, "requests": {}}], r"requests\[0\].requests is not a list"),
        ([turn(0.0, hashes=range(9)) | {"in": 64}], r"requests\[0\]: .*9 hashes of 64 tokens for a prompt of 64"),
        (["turn"], r"requests\[0\]: a str where an object"),
    ],
)
def test_a_bad_session_is_one_bad_line(tmp_path, requests, reason):
    path = write_sessions(tmp_path, {"requests": requests}, {"requests": [turn(0.0)]})
    with pytest.raises(InputError, match=f"line 1: {reason}"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.requests), trace.num_skipped) == (1, 1)


def test_limit_cuts_a_session_behind_a_turn(tmp_path):
    path = write_sessions(tmp_path, {"requests": [turn(float(i)) for i in range(5)]})
    assert outline(read_trace(path, limit=2)) == outline(read_trace(path))[:2]


def write_lengths(tmp_path, *rows):
    path = tmp_path / "trace"
    path.write_text(HEADER + "\n".join(rows))
    return path


def test_lengths_make_hashes_with_the_stated_prefix(tmp_path):
    rows = [
        "a,main,0,0.0,200,5,3,,2.0,0.0",
        "a,main,1,9.0,320,5,5,2,2.0,7.0",
        "a,main.0,0,0.0,64,5,1,,,0.0",
        "b,main,0,0.0,200,5,3,,,",
        "b,main,1,4.5,200,0,3,3,2.0,",
        "a,main,2,20.0,100,5,1,1,2.0,",
    ]
    trace = read_trace(write_lengths(tmp_path, *rows))
    hashes = [r.block_hashes.tolist() for r in trace.requests]
    assert hashes[1][:2] == hashes[0][:2]
    assert hashes[4] == hashes[3]
    assert hashes[5] == hashes[1][:1]
    distinct = hashes[0] + hashes[1][2:] + hashes[2] + hashes[3]
    assert len(set(distinct)) == len(distinct)
    assert outline(trace) == [
        ("a", None, 0.0, 0.0),
        ("a", 0, 7.0, 0.0),
        ("a", None, 0.0, 0.0),
        ("b", None, 0.0, 0.0),
        ("b", 3, 4.5, 0.0),
        ("a", 1, 9.0, 0.0),  # 20 - 9 - the 2 s of the call before
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a,main,1,-1,320,5,5,2,2.0,7.0", "t_s='-1'"),
        ("a,main,1,9.0,320,5,6,2,2.0,7.0", "hash_blocks=6 of 64 tokens for 320"),
        ("a,main,1,9.0,320,5,5,4,2.0,7.0", "the turn before 3"),
        ("z,main,0,9.0,320,5,5,1,2.0,7.0", "the turn before is missing"),
        ("a,main,1,9.0,320,5,5,2,2.0,soon", "think_time_s='soon'"),
    ],
)
def test_bad_length_rows_are_named(tmp_path, line, reason):
    path = write_lengths(tmp_path, "a,main,0,0.0,200,5,3,,2.0,0.0", line)
    with pytest.raises(InputError, match=f"line 3: .*{reason}"):
        read_trace(path)
    assert read_trace(path, skip_bad=True).num_skipped == 1


def test_turns_of_a_branch_are_in_order(tmp_path):
    path = write_lengths(tmp_path, "a,main,0,5.0,9,5,0,,,", "a,main,1,4.0,9,5,0,,,")
    with pytest.raises(InputError, match=r"line 3: t_s steps back from 5 s to 4 s"):
        read_trace(path)
