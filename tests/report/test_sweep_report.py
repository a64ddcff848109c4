"""The report of a sweep: what stands in it, and that it fits a terminal."""

import re
from dataclasses import replace

import pytest

from cpkit.report.sweep_report import LINE, SweepFacts, sweep_data, sweep_report
from cpkit.sizing.sweep.candidates import Refused
from cpkit.sizing.sweep.choice import Aim, choose
from cpkit.workload.request import Request, Trace
from tests.sizing.sweep.small import TRACE, make_setting, outcome


def facts(trace=TRACE, refused=(), **changes):
    kinds = {"measured": 3.0, "hardware": 1.0}
    return SweepFacts(trace, make_setting(**changes), refused, kinds, 12.0)


def widened(one, **sizes):
    return replace(one, candidate=replace(one.candidate, **sizes))


SEVERAL = [
    widened(outcome(64, 8, 0.05, 100.0, 2_000_000), tp=4, pcp=8, dcp=32),
    widened(outcome(64, 3302, 0.541, 95.0, 12_500_000, kv_peak=1.0), tp=16, pcp=1, dcp=16),
    widened(outcome(64, 9000, 12.0, 20.0, 1_000_000), tp=16, pcp=2, dcp=32),
    widened(outcome(16, 9, 0.9, 99.0, 990_000, kv_peak=1.0, preemptions=7), tp=2, pcp=8, dcp=1),
    widened(outcome(128, 2, 0.04, 60.0, 4_000_000), tp=4, pcp=16, dcp=64),
]
LONG = "no room for KV on h200: 118.2 GiB usable less 627.5 GiB of weights and 2.3 GiB of buffers a rank; " * 2


@pytest.mark.parametrize("engine", ["cpkit", "sglang"])
def test_lines_fit_a_terminal(engine):
    refused = [Refused(one.candidate, LONG) for one in SEVERAL]
    partition = "round_robin" if engine == "sglang" else "head_tail"
    outcomes = [widened(one, partition=partition) for one in SEVERAL]
    text = sweep_report(choose(outcomes, Aim()), facts(refused=refused, engine=engine))
    sections = text.partition("Beaten by none")
    assert max(map(len, sections[0].splitlines())) <= LINE
    assert max(map(len, sections[2].splitlines())) <= LINE + 12  # tables of long names


def test_what_beats_what_in_figures():
    text = sweep_report(choose(SEVERAL, Aim()), facts())
    taken = next(line for line in text.splitlines() if line.startswith("  > "))
    assert "2x tp4 pcp8 dcp32" in taken
    assert len([line for line in text.splitlines() if line.startswith("  + ")]) == 1, "that of 128 GPUs keeps it too"
    beaten = next(line for line in text.splitlines() if "2x tp16 pcp2 dcp32" in line)
    assert re.search(r"9,000 > \S+ s +12.00 s > \S+ ms +20 < \d+ +1.00M < ", beaten)
    equal = [widened(outcome(8, 5, 0.05, 100.0, 10), dcp=4), outcome(8, 8, 0.05, 100.0, 10)]
    beaten = sweep_report(choose(equal, Aim()), facts()).splitlines()[-1]
    assert beaten.split()[-5:] == ["5.00", "s", "=", "=", "="] and "8.00 > 5.00 s" in beaten


def test_a_gpus_share_of_what_comes_in():
    text = sweep_report(choose(SEVERAL, Aim()), facts())
    rate = sum(request.prompt_len + request.output_len for request in TRACE.requests) / TRACE.requests[-1].arrival_s
    assert f"Load      {rate:,.0f} tokens/s come in over 4.60 s" in text
    assert f"{rate / 16:,.0f} on 16, {rate / 64:,.0f} on 64, {rate / 128:,.0f} on 128" in text
    turns = Trace("turns", "plain", (Request(0, 0.0, 9, 9), Request(1, 3.0, 9, 9, depends_on=0)))
    assert "Load" not in sweep_report(choose(SEVERAL, Aim()), facts(turns)), "turns come as fast as they are answered"


def test_sources_and_flags_are_told():
    choice = choose(SEVERAL, Aim())
    text = sweep_report(choice, facts())
    assert "2x tp4 pcp8 dcp32, 8: 75.0% measured, 25.0% hardware" in text
    assert "-tp 4 -pcp 8 -dcp 32 --cp-kv-cache-interleave-size 64 --dcp-comm-backend ag_rs" in text
    lines = [line.strip(" \\") for line in text.splitlines() if line.startswith("            -")]
    assert len(lines) == 2 and lines[1].endswith("--max-num-seqs 256 --max-model-len 20000"), (
        "a flag has its value beside it"
    )
    data = sweep_data(choice, facts())
    assert data["flags"] in " ".join(text.replace("\\", "").split()) and data["source_seconds"] == {
        "measured": 3.0,
        "hardware": 1.0,
    }


def test_refused_requests_are_told():
    some = [replace(one, refused=1, finished=3) for one in SEVERAL[:2]]
    text = sweep_report(choose(some, Aim()), facts())
    assert "Refused   25.0% of the requests by every deployment" in text
    assert next(line for line in text.splitlines() if line.startswith("  > ")).endswith("25.0%")
    assert sweep_data(choose(some, Aim()), facts())["refused_by_all"] == 0.25
    whole = sweep_report(choose(SEVERAL, Aim()), facts())
    assert "Refused" not in whole and "refused" not in whole
    none = sweep_report(choose([replace(SEVERAL[0], refused=9, finished=0)], Aim()), facts())
    assert "Take      nothing: no deployment serves a request" in none


def test_nothing_replayed_says_so():
    refused = [Refused(SEVERAL[0].candidate, "vllm-x: no")]
    text = sweep_report(choose([], Aim()), facts(refused=refused))
    assert (
        "Beaten" not in text
        and "come in over 4.60 s\n" in text
        and "nothing: no deployment was replayed" in text
        and "1  64 GPUs, 2x tp4 pcp8 dcp32, 8: vllm-x: no" in text
    )
