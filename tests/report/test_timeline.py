"""Chrome traces of a replay: their structure, read by code that shares nothing with the writer, and their times."""

import json
from collections import defaultdict

import pytest

import cpkit.simulate.loop
from cpkit.cli.main import main
from cpkit.planner.collectives import Collective
from cpkit.report.timeline import default_ranks
from cpkit.report.timeline_layout import fold_layers
from cpkit.sizing.cost.step import CollectiveCost, LayerCost, StageCost
from cpkit.sizing.figures import Figure
from cpkit.topology import Topology

MEASURED = Figure(1.0, "measured", "here")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    lens = [(700, 9), (64, 5), (1, 1), (4000, 3), (300, 0)]
    lines = [f"{0.04 * i},{prompt},{output}" for i, (prompt, output) in enumerate(lens)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines]) + "\n")
    return str(path)


def timeline(capsys, tmp_path, trace, *argv):
    path = tmp_path / "timeline.json"
    flags = ["--cost", "h200", "--processes", "1", "--check", "none", "--timeline", str(path)]
    code = main(["simulate", trace, *flags, *argv])
    out, err = capsys.readouterr()
    return code, out, err, path


def ns(event, field="ts"):
    """A time of the trace in nanoseconds; it is a whole number of them."""
    value = event[field] * 1000
    assert abs(value - round(value)) < 1e-3
    return round(value)


REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    **{phase: {"name", "cat", "id", "pid", "tid", "ts", "bp"} for phase in "stf"},
}
"""Fields of each phase in the Trace Event Format that a viewer needs."""


def check_format(events):
    """Whole numbers where viewers want them, names before what they name, and no track with a process's number."""
    named = set()
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys()
        assert all(type(event[field]) is int and event[field] >= 0 for field in ("pid", "tid", "id") if field in event)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            named |= {(event["name"], event["pid"])} | {(event["name"], event["pid"], event["tid"])}
            continue
        assert ("process_name", event["pid"]) in named and ("thread_name", event["pid"], event["tid"]) in named
        if event["ph"] == "C":
            assert all(type(value) in (int, float) for value in event["args"].values())
    assert not {event["pid"] for event in events} & {event["tid"] for event in events}


def check_structure(events):
    """Tracks in order without overlaps, flows from one start to one end inside slices, counters not negative.

    Returns slices by (process, track), tracks counted from 0, and the events of each flow.
    """
    check_format(events)
    first_track = 1 + max(event["pid"] for event in events)
    slices, last, flows = defaultdict(list), {}, defaultdict(list)
    for event in events:
        track = event["pid"], event["tid"] - first_track
        if event["ph"] == "M":
            continue
        assert ns(event) >= last.get(track, 0), "a track goes back in time"
        last[track] = ns(event)
        if event["ph"] == "X":
            start, dur = ns(event), ns(event, "dur")
            assert dur > 0
            assert not slices[track] or slices[track][-1][1] <= start, f"overlap on {track}"
            slices[track].append((start, start + dur, event))
        elif event["ph"] == "C":
            assert event["args"] and min(event["args"].values()) >= 0
        else:  # behind the slice that it binds to, in the file too: viewers keep the order of equal times
            assert slices[track] and slices[track][-1][0] <= ns(event) < slices[track][-1][1]
            flows[event["id"]].append((track, event))
    for chain in flows.values():
        phases = sorted(event["ph"] for _, event in chain)
        assert phases == ["f", "s"] + ["t"] * (len(chain) - 2) if len(chain) > 1 else False
        assert len({track for track, _ in chain}) == len(chain)
        assert len({(event["name"], event["cat"]) for _, event in chain}) == 1, "what a flow is known by"
        times = {phase: [ns(event) for _, event in chain if event["ph"] == phase] for phase in "stf"}
        assert all(time >= times["s"][0] for time in times["t"] + times["f"]), "an arrow back in time"
        for track, event in chain:
            around = [piece for piece in slices[track] if piece[0] <= ns(event) < piece[1]]
            assert [piece[2]["name"] for piece in around] == [event["name"]] and event["bp"] == "e"
    return slices, {number: [event for _, event in chain] for number, chain in flows.items()}


V4 = [
    "--model",
    "deepseek-v4-pro",
    "--block-size",
    "256",
    "--cp-kv-cache-interleave-size",
    "128",
    "-tp",
    "2",
    "-dcp",
    "2",
]
WORLDS = [
    pytest.param(["-tp", "2", "-pcp", "2", "-dcp", "4"], id="pcp-dcp"),
    pytest.param(["-tp", "4", "-dcp", "4"], id="dcp-alone"),
    pytest.param(["-pcp", "3"], id="pcp-alone"),
    pytest.param(["-tp", "2", "-pcp", "2", "-dcp", "4", "--overlap", "0.7"], id="overlap"),
    pytest.param(["-tp", "2", "-pcp", "2", "-dcp", "2", "--overlap", "1"], id="all-hidden"),
    pytest.param(V4, id="v4-several-kinds-of-layers"),
]


@pytest.mark.parametrize("world", WORLDS)
def test_structure_and_times(capsys, tmp_path, trace, world):
    code, out, err, path = timeline(capsys, tmp_path, trace, *world)
    assert (code, err) == (0, "")
    data = json.loads(path.read_text())
    assert data["otherData"]["layers of"] == "the kernels alone"
    assert data.keys() == {"traceEvents", "otherData"}, "displayTimeUnit: Perfetto 20 reads the times as milliseconds"
    counters = {f"{e['name']} {series}" for e in data["traceEvents"] if e["ph"] == "C" for series in e["args"]}
    assert counters == {"KV blocks held", "requests running", "requests waiting"}, "as Perfetto names their tracks"
    slices, flows = check_structure(data["traceEvents"])
    ranks = sorted({pid for pid, track in slices if track == 1})
    steps = next(pieces for (_, track), pieces in slices.items() if track == 0)
    assert f"{len(steps)} steps, all {len(ranks)} ranks" in out and flows
    collectives = [[piece[:2] for piece in slices[rank, 2]] for rank in ranks]
    assert all(times == collectives[0] for times in collectives), "ranks enter collectives together"
    for rank in ranks:
        for start, stop, _ in slices[rank, 1] + slices[rank, 2]:
            assert any(step[0] <= start + 2 and stop <= step[1] + 200 for step in steps), "work outside all steps"


@pytest.mark.parametrize("world", WORLDS[:3])
def test_a_step_is_its_slowest_rank_and_its_collectives(capsys, tmp_path, trace, world):
    *_, path = timeline(capsys, tmp_path, trace, *world)
    slices, _ = check_structure(json.loads(path.read_text())["traceEvents"])
    steps = next(pieces for (_, track), pieces in slices.items() if track == 0)
    ranks = [pid for pid, track in slices if track == 1]
    for begin, end, _ in steps:
        compute, total = defaultdict(float), 0.0
        for rank in ranks:
            for start, _, event in slices[rank, 1]:
                if begin <= start + 2 < end:
                    num, _, kind = event["args"]["layers"].partition(" x ")
                    compute[kind, rank] += int(num) * event["args"]["us a layer"]
        for start, _, event in slices[ranks[0], 2]:
            if begin <= start + 2 < end:
                total += int(event["args"]["layers"].split()[0]) * event["args"]["us a layer"]
        total += sum(max(compute[kind, rank] for rank in ranks) for kind in {kind for kind, _ in compute})
        assert total * 1000 == pytest.approx(end - begin, rel=1e-3)


def test_ranks_and_steps_that_are_asked_for(capsys, tmp_path, trace):
    world = ["-tp", "2", "-pcp", "2", "-dcp", "4", "--timeline-ranks", "3,0", "--timeline-steps", "2"]
    code, out, _, path = timeline(capsys, tmp_path, trace, *world)
    assert code == 0 and "the first 2 of" in out and "ranks 3, 0 of 4; --timeline-ranks draws others" in out
    slices, flows = check_structure(json.loads(path.read_text())["traceEvents"])
    assert {pid for pid, track in slices if track} == {0, 3} and len(slices[4, 0]) == 2
    # of the groups pcp {0 2} {1 3}, tp {0 1} {2 3} and dcp {0 2 1 3} only dcp has two of the ranks
    dcp = {"index_keys", "candidates", "latent_rows", "query_heads", "lse", "outputs"}
    assert flows and {event["name"] for chain in flows.values() for event in chain} <= dcp


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        pytest.param(["--timeline-ranks", "0,4"], "no rank 4 to draw", id="rank-outside"),
        pytest.param(["--timeline-ranks", "1,1"], "each once", id="rank-twice"),
        pytest.param(["--timeline-steps", "0"], "at least one step", id="no-step"),
        pytest.param(["-pcp", "3", "-dcp", "6"], "cannot be scattered", id="a-world-refused-by-the-replay"),
    ],
)
def test_refusals_leave_no_file(capsys, tmp_path, trace, flags, told):
    code, _, err, path = timeline(capsys, tmp_path, trace, "-tp", "2", "-pcp", "2", *flags)
    assert code == 2 and told in err and err.count("\n") == 1 and not path.exists()


@pytest.mark.parametrize("other", ["--html", "--json"])
def test_one_file_for_two_outputs_is_refused(capsys, tmp_path, trace, other):
    same = str(tmp_path / "." / "timeline.json")
    code, _, err, path = timeline(capsys, tmp_path, trace, other, same)
    assert code == 2 and "would both write it" in err and not path.exists()


@pytest.mark.parametrize("flags", [["--timeline", "x.json"], ["--timeline-steps", "3"], ["--timeline-ranks", "0"]])
def test_flags_that_do_not_go_alone(capsys, trace, flags):
    assert main(["simulate", trace, *flags]) == 2
    assert ("add --cost CHIP" if flags[0] == "--timeline" else "name the file") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        pytest.param({"tp": 4, "pcp": 4}, list(range(16)), id="16-all"),
        pytest.param({"tp": 32}, list(range(16)), id="tp-alone"),
        pytest.param({"tp": 8, "pcp": 3}, [0, 8, 16], id="a-rank-of-each-place"),
        pytest.param({"tp": 8, "pcp": 32}, [16 * i for i in range(16)], id="every-other-place"),
        pytest.param({"pcp": 17}, [0, 2, 4, 6, 8, 10, 12, 14, 16], id="17-places"),
    ],
)
def test_ranks_of_large_worlds(sizes, ranks):
    assert default_ranks(Topology(**sizes)) == ranks


def make_layer(overlap, **collectives):
    """Two ranks, two layers: project 2 and 1 s, index 1 and 3 s; collectives by the stage that waits for them."""
    stages = (StageCost("project", (2.0, 1.0), MEASURED), StageCost("index", (1.0, 3.0), MEASURED))
    one = Collective("all_gather", "dcp", "index_keys", "uint8", 1)
    costs = tuple(CollectiveCost(one, stage, seconds, MEASURED) for stage, seconds in collectives.items())
    return LayerCost("dsa", 2, stages, costs, overlap)


def test_slices_shrink_alike_where_ranks_take_turns_to_be_slow():
    folded = fold_layers(make_layer(0.0, index=1.0))
    # the slowest rank computes 4 s, but the slowest of each stage 2 + 3 s: all are drawn at 4 / 5
    assert folded.shrink == pytest.approx(0.8) and folded.seconds == pytest.approx(2 * 5.0)
    assert [(p.start, p.stop) for p in folded.stages] == [pytest.approx((0, 3.2)), pytest.approx((5.2, 10.0))]
    assert [(p.start, p.stop) for p in folded.collectives] == [pytest.approx((3.2, 5.2))]


def test_hidden_collectives_begin_earlier():
    folded = fold_layers(make_layer(0.5, index=2.0))  # 1 of 2 s hides: 5 s a layer
    assert folded.seconds == pytest.approx(10.0)
    assert [(p.start, p.stop) for p in folded.collectives] == [pytest.approx((1.2, 5.2))]


def test_a_collective_with_nothing_before_it_runs_on_behind_the_stage():
    folded = fold_layers(make_layer(1.0, project=3.0, index=1.0))  # all 4 s hide behind 4 s of computation
    assert folded.seconds == pytest.approx(8.0)
    assert [(p.start, p.stop) for p in folded.collectives] == [pytest.approx((0, 6)), pytest.approx((6, 8))]


def test_an_interrupted_replay_leaves_a_whole_file(capsys, tmp_path, trace, monkeypatch):
    real, calls = cpkit.simulate.loop.record_lot, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(cpkit.simulate.loop, "record_lot", interrupted)
    monkeypatch.setattr(cpkit.simulate.loop, "LOT_PLANS", 4)
    code, _, _, path = timeline(capsys, tmp_path, trace, "-tp", "2", "-pcp", "2")
    assert code == 130
    slices, _ = check_structure(json.loads(path.read_text())["traceEvents"])
    assert len(slices[4, 0]) >= 1
