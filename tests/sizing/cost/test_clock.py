"""The cost model as a clock: the quick one against the planned one, strides of decode steps against single steps."""

import json

import numpy as np
import pytest

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.cli.main import main
from cpkit.errors import ConfigError
from cpkit.model import load_model
from cpkit.settings import StepSettings
from cpkit.simulate.loop import simulate
from cpkit.simulate.pressure import Pressure
from cpkit.simulate.result import ReplaySettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.clock import PlannedClock, QuickClock
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.weights import load_weights
from cpkit.topology import Topology
from cpkit.workload.request import Request, Trace
from cpkit.workload.scheduler import Scheduler

MODEL = load_model("deepseek-v3.2")
LENS = ((7000, 90), (300, 40), (64, 5), (1, 1), (12_000, 200), (2500, 0), (900, 61))


def make_clocks(drafts=0, **sizes):
    settings = StepSettings(Topology(**sizes), MODEL, default_budget(MODEL, num_speculative_tokens=drafts))
    model = CostModel(MODEL, load_weights("deepseek-v3.2", MODEL), settings.topology, chip("h200"))
    return settings, QuickClock(model, settings, MODEL.max_model_len), PlannedClock(model, settings)


def make_trace(gap_s=0.1):
    return Trace("made", "plain", tuple(Request(i, gap_s * i, *pair) for i, pair in enumerate(LENS * 3)))


@pytest.mark.parametrize(
    "sizes", [{"tp": 8}, {"tp": 8, "dcp": 8}, {"tp": 4, "pcp": 2}, {"tp": 2, "pcp": 4, "dcp": 8}, {"pcp": 8}], ids=str
)
def test_the_quick_clock_is_near_the_planned_one(sizes):
    rng = np.random.default_rng(0)
    _, quick, planned = make_clocks(**sizes)
    for num_reqs in (1, 3, 50, 256):
        for longest in (3000, 120_000):
            batch = Batch.from_lens(rng.integers(500, longest, num_reqs), [1] * num_reqs)
            assert quick.step_seconds(batch) == pytest.approx(planned.step_seconds(batch), rel=0.06)
    mixed = Batch.from_lens([5000, 70000, 2048], [1, 1, 2048], [4000, 60000, 2048])
    assert quick.step_seconds(mixed) == pytest.approx(planned.step_seconds(mixed), rel=0.02)


def test_a_stride_costs_as_much_as_its_steps():
    _, quick, _ = make_clocks(tp=8)
    strided = quick.step_seconds(Batch.from_lens([1009, 5009], [10, 10], [900, 900]))
    single = sum(quick.step_seconds(Batch.from_lens([1000 + i, 5000 + i], [1, 1], [900, 900])) for i in range(10))
    assert strided == pytest.approx(single, rel=1e-3)


def test_drafts_are_no_stride():
    _, quick, planned = make_clocks(drafts=2, tp=8)
    batch = Batch.from_lens([1000, 5000], [3, 3], [900, 900])
    assert quick.step_seconds(batch) == pytest.approx(planned.step_seconds(batch), rel=0.06)


@pytest.mark.parametrize("gap_s", [0.0, 0.3, 20.0], ids=["at-once", "flowing", "one-by-one"])
def test_strides_change_no_token_and_hardly_a_time(gap_s):
    settings, quick, _ = make_clocks(tp=8)
    replays = []
    for stride in (1, 32):
        pool = {"num_kv_blocks": 2000, "max_model_len": 20_000}
        scheduler = Scheduler(
            make_trace(gap_s), settings.topology, settings.budget, **pool, clock=quick, decode_stride=stride
        )
        for _ in scheduler:
            scheduler.check()
        replays.append(scheduler.stats)
    one, many = replays
    assert many.num_steps < 0.5 * one.num_steps
    assert (many.num_tokens, many.num_finished, many.output_tokens) == (one.num_tokens, 21, one.output_tokens)
    assert many.elapsed_s == pytest.approx(one.elapsed_s, rel=0.02)
    for name in ("ttft_s", "tpot_s", "latency_s", "queue_s"):
        a, b = getattr(one, name), getattr(many, name)
        assert np.abs(a - b).max() <= 0.05 * a.max() + 0.05, name


def test_strides_and_drafts_exclude_each_other():
    settings, quick, _ = make_clocks(drafts=1, tp=8)
    with pytest.raises(ConfigError, match="decode_stride=4"):
        Scheduler(
            make_trace(), settings.topology, settings.budget, num_kv_blocks=99, max_model_len=20_000, clock=quick,
            decode_stride=4,
        )  # fmt: skip


def test_a_replay_on_the_model_reports_where_its_time_went():
    settings, _, clock = make_clocks(tp=2, pcp=2)
    replay = ReplaySettings(num_kv_blocks=900, max_model_len=20_000, check_every=0)
    simulation = simulate(make_trace(), settings, replay, clock=clock)
    cost, stats = simulation.cost, simulation.stats
    assert cost.busy * stats.elapsed_s == pytest.approx(clock.totals.seconds)
    assert sum(cost.kinds.values()) == pytest.approx(
        sum(cost.stages.values()) + sum(cost.collectives.values()), rel=1e-6
    )
    assert set(cost.idle) == {0, 2} and all(0 <= share < 0.5 for share in cost.idle.values())
    assert stats.output_tokens == 3 * sum(output for _, output in LENS)
    assert cost.per_gpu == pytest.approx((cost.prompt_tokens_s + cost.output_tokens_s) / 4)
    assert 0 < cost.kv.mean <= cost.kv.p99 <= cost.kv.most <= 1
    assert simulation.to_json()["cost"]["ttft_s"]["p99"] == cost.ttft_s.p99 == simulation.ttft_s.p99


def test_pressure_is_weighed_by_time():
    pressure = Pressure([1.0, 8.0, 1.0], held_blocks=[0, 10, 30], running=[1, 2, 3], waiting=[0, 0, 5])
    level = pressure.level("held_blocks")
    assert (level.mean, level.p99, level.most) == (11.0, 30.0, 30.0)
    assert Pressure().level("running").most == 0


def test_simulate_takes_the_model_as_its_clock(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,900,9\n0.1,70,3\n")
    flags = ["simulate", str(path), "-tp", "2", "-pcp", "2", "--processes", "1"]
    assert main([*flags, "--cost", "h200"]) == 0
    text = capsys.readouterr().out
    assert "Cost model, H200-SXM: an estimate" in text and "time per output token" in text and "rank 2" in text
    assert main([*flags, "--cost", "h200", "--overlap", "1", "--json", "-"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["assumptions"]["overlap"] == 1 and cost["tpot_s"]["p50"] > 0 and cost["idle"].keys() == {"0", "2"}
    for wrong in (["--overlap", "0.5"], ["--cost", "h900"], ["--cost", "h200", "--overlap", "2"]):
        assert main([*flags, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_an_engines_layers_take_longer_and_every_stage_says_where_its_seconds_come_from(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,3000,5\n0,200,9\n")
    flags = ["simulate", str(path), "-tp", "8", "--check", "none", "--num-speculative-tokens", "1"]
    found = {}
    for engine in ("cpkit", "vllm"):
        assert main([*flags, "--cost", "h200", "--engine", engine, "--json", "-"]) == 0
        found[engine] = json.loads(capsys.readouterr().out)["cost"]
    assert found["vllm"]["tpot_s"]["p50"] > found["cpkit"]["tpot_s"]["p50"] + 61 * 75e-6 / 2  # up to 2 tokens a step
    assert "engine" not in found["cpkit"]["stages"]
    cost = found["vllm"]
    for name, seconds in {**cost["stages"], **cost["collectives"]}.items():
        assert sum(cost["sources"][name].values()) == pytest.approx(seconds)
    assert cost["sources"]["engine"].keys() == {"calibrated"} and len(cost["sources"]["index"]) > 1
    assert sum(map(sum, (source.values() for source in cost["sources"].values()))) == pytest.approx(
        sum(cost["kinds"].values())
    )
    assert main([*flags, "--cost", "h200", "--engine", "vllm"]) == 0
    out = capsys.readouterr().out
    assert "Cost model, H200-SXM, layers of vllm: an estimate" in out
    assert "both by the cost model of H200-SXM with layers of vllm, an estimate" in out
    page = tmp_path / "page.html"
    assert main([*flags, "--cost", "h200", "--engine", "vllm", "--html", str(page)]) == 0
    assert "Times by the cost model of H200-SXM with layers of vllm, an estimate." in page.read_text()
    capsys.readouterr()
    assert main(flags) == 0
    assert "both by the step clock, a rough estimate" in capsys.readouterr().out
    assert main([*flags, "--engine", "vllm"]) == 2
    assert "belong to --cost CHIP" in capsys.readouterr().err
