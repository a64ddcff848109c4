"""The comparison with a GPU, without one: a timer of its own arithmetic, and every path behind a measurement."""

import gzip
import json

import pytest

from benchmarks import cost_check, cost_links
from benchmarks.cost_check import errors_of_steps, steps_table
from benchmarks.cost_measure import decode_grid, measure, prefill_grid, steps
from cpkit.sizing.cost.tables import cpkit_tables
from tests.sizing.pages import BLOCK, DOCS

PEAK, BANDWIDTH, LAUNCH_S = 1.4e15, 4.2e12, 3e-6


class RooflineTimer:
    """Milliseconds by rooflines of each launch: every run of a chunk by the keys that its own tokens see."""

    def prefill(self, parts, num_keys, run):
        seen = [position + token + 1 for position, count in parts for token in range(count)]
        logits_s = topk_s = 0.0
        for first in range(0, len(seen), run):
            pairs = sum(seen[first : first + run])
            logits_s += max(2 * 64 * 128 * pairs / PEAK, 4 * pairs / BANDWIDTH) + LAUNCH_S
            topk_s += 4 * pairs / BANDWIDTH + LAUNCH_S
        keys_s = 2 * 132 * num_keys / (0.85 * 4.8e12) + LAUNCH_S
        return {"keys": 1e3 * keys_s, "logits": 1e3 * logits_s, "topk": 1e3 * topk_s}

    def decode(self, lens, tokens):
        reads = -(-tokens // 2)
        logits_s = reads * 136 * sum(lens) / BANDWIDTH + LAUNCH_S
        topk_s = max(4 * tokens * sum(lens), 40 * max(lens)) / BANDWIDTH + LAUNCH_S
        return {"logits": 1e3 * logits_s, "topk": 1e3 * topk_s}


@pytest.fixture(scope="module")
def found():
    said, kept = [], []
    result = measure(RooflineTimer(), lambda each: kept.append(json.dumps(each)), 600, said.append)
    return result, said, kept


def test_every_shape_is_timed_told_and_kept_as_it_comes(found):
    result, said, kept = found
    shapes = len(prefill_grid()) + len(decode_grid()) + len(list(steps()))
    assert len(said) == len(kept) == shapes and result["left_out"] == []
    assert len(result["grid"]) == 2 * (len(prefill_grid()) + len(decode_grid()))
    assert len(json.loads(kept[0])["grid"]) == 2 and json.loads(kept[-1]) == result


def test_steps_cover_prefills_of_8k_to_512k_on_one_and_of_two_and_decodes_with_and_without_drafts():
    plans = [step.plan() for step in steps()]
    prefills = [plan for plan in plans if not plan.batch.num_decodes]
    for pcp in (1, 2):
        contexts = [int(plan.batch.seq_lens[0]) for plan in prefills if plan.topology.pcp == pcp]
        assert (min(contexts), max(contexts)) == (8192, 524288)
    assert {plan.budget.num_speculative_tokens for plan in plans if plan.batch.num_decodes} == {0, 1, 3}


def test_a_timer_that_keeps_to_rooflines_is_predicted_within_10_per_cent(found):
    """The amounts of each plan and the grid between its points: what is left is the kernels' own behaviour."""
    rows = list(errors_of_steps(found[0]))
    assert len(rows) == len(list(steps()))
    for name, measured, predicted, _, _ in rows:
        assert sum(predicted.values()) == pytest.approx(sum(measured.values()), rel=0.1), name


def test_the_table_of_a_run_judges_it(found, tmp_path, monkeypatch):
    monkeypatch.setattr(cost_check, "RESULT", tmp_path / "found.json")
    assert steps_table() == "No run is recorded yet."
    (tmp_path / "found.json").write_text(json.dumps({"date": "today", **found[0]}))
    lines = steps_table().splitlines()
    assert len(lines) == 2 + len(list(steps())) + 2
    assert lines[-1] == f"{len(list(steps()))} of {len(list(steps()))} steps are within 10%."
    slower = json.loads(json.dumps(found[0]))
    slower["steps"][0]["ms"]["logits"] *= 2
    (tmp_path / "found.json").write_text(json.dumps(slower))
    assert f"{len(list(steps())) - 1} of {len(list(steps()))} steps are within 10%." in steps_table()


def test_a_run_that_is_out_of_time_keeps_what_it_has(found, tmp_path, monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr("benchmarks.cost_measure.time.monotonic", lambda: float(next(ticks)))
    said = []
    limit_s = 2 * len([*prefill_grid(), *decode_grid()]) + 4  # the clock is read twice a shape
    result = measure(RooflineTimer(), lambda each: None, limit_s, said.append)
    names = [step.name for step in steps()]
    assert 0 < len(result["steps"]) < len(names)
    assert result["left_out"] == names[len(result["steps"]) :]
    left = len(result["left_out"])
    assert said[-1] == f"{limit_s} s are over: {left} of {len(said) - 1 + left} shapes are left out"
    monkeypatch.setattr(cost_check, "RESULT", tmp_path / "found.json")
    (tmp_path / "found.json").write_text(json.dumps(result))
    assert "shapes were left out for time" in steps_table()


@pytest.mark.parametrize("step", [pytest.param(step, id=step.name) for step in steps() if step.batch.num_tokens < 300])
def test_a_decodes_step_is_timed_with_the_tokens_of_its_plan(step):
    class Asked:
        def decode(self, lens, tokens):
            self.shape = len(lens), tokens, sum(lens)
            return {"logits": 1.0, "topk": 1.0}

    from benchmarks.cost_measure import time_step

    timer = Asked()
    time_step(timer, step.plan())
    assert timer.shape == (
        step.batch.num_reqs,
        step.batch.num_tokens // step.batch.num_reqs,
        int(step.batch.seq_lens.sum()),
    )


def test_the_device_timer_runs_every_work_it_times():
    """On a CPU, with the kernels' torch forms, at shapes that are no multiple of a page or of a run."""
    pytest.importorskip("torch")
    from benchmarks.cost_timer import DeviceTimer

    ran = []

    def once(works):
        for name, work in works.items():
            work()
            ran.append(name)
        return dict.fromkeys(works, 1.0)

    timer = DeviceTimer("cpu", "torch", once)
    assert timer.prefill([(0, 40), (100, 61)], 201, 32) == {"keys": 1.0, "logits": 1.0, "topk": 1.0}
    assert timer.decode([70, 129, 1000], 4) == {"logits": 1.0, "topk": 1.0}
    assert ran == ["keys", "logits", "topk", "logits", "topk"]


def test_short_work_is_timed_many_times_in_a_row(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from benchmarks import cost_timer, timing

    def time_together(works, copies=1):
        return {name: (0.01 if name == "short" else 5.0) if copies == 1 else 0.002 for name in works}

    monkeypatch.setattr(timing, "time_together", time_together)
    assert cost_timer.graph_ms({"long": print, "short": print}) == {"long": 5.0, "short": 0.002}


@pytest.mark.parametrize("world", cost_check.PROGRAM_WORLDS)
def test_the_rank_programs_stages_are_compared_where_it_was_run(world, tmp_path, monkeypatch):
    """Stage names are those that benchmarks/indexer_rank.py marks."""
    monkeypatch.setattr(cost_check, "PROGRAM", tmp_path / "program.json")
    assert cost_check.program_table() == "No run is recorded yet."
    predicted = cost_check.program_stages(cost_check.PROGRAM_WORLDS[world], 32768)
    shards = world == "tp 2, dcp 2"
    assert list(predicted) == ["keys", "logits", "top-k", *(["exchange"] if shards else [])]
    ms = {"queries": 1.0, "insert": 1.0, **{stage: taken / 1.05 for stage, taken in predicted.items()}, "total": 9.0}
    row = {"world": world, "context": 32768, "way": "candidates" if shards else "written", "ms": ms}
    rows = [row, {**row, "way": "listed"}, {**row, "world": "pcp 2, dcp 2, symmetric"}]
    (tmp_path / "program.json").write_text(json.dumps({"one_gpu": {"rows": rows[:1]}, "several_gpus": {"rows": rows}}))
    table = cost_check.program_table()
    assert len(table.splitlines()) == 3 and table.count("+5.0%") == 1 + len(predicted)


# ---- two GPUs ------------------------------------------------------------------------------------------------------


def test_collectives_of_a_run_are_compared_one_by_one_and_summed_over_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(cost_links, "RESULT", tmp_path / "links.json")
    assert cost_check.links_table() == "No run is recorded yet."
    sizes = cost_links.sizes()
    assert len(sizes) == len({call.key for call in sizes}) > 15
    rows = [
        {"what": call.name, "op": call.collective.op, "bytes": call.bytes, "ms": 1e3 * call.seconds / 1.05}
        for call in sizes
    ]
    (tmp_path / "links.json").write_text(json.dumps({"rows": rows}))
    table = cost_check.links_table()
    assert table.count("+5.0%") == len(sizes) + len(list(cost_links.steps()))
    (tmp_path / "links.json").write_text(json.dumps({"rows": rows[:1]}))
    assert cost_check.links_table().count("+5.0%") == 1, "a step that was not measured whole is not summed"


def test_a_steps_calls_are_those_of_all_its_layers():
    for name, calls in cost_links.steps():
        assert all(times % 61 == 0 or call.collective.what == "hidden_rows" for call, times in calls), name


def test_collectives_are_run_timed_and_kept(tmp_path):
    """One process over gloo: every operation is issued with buffers that fit it."""
    dist = pytest.importorskip("torch.distributed")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        kept = []

        def once(work):
            work()
            return 1.0

        small = [call for call in cost_links.sizes() if call.bytes < 1 << 21]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cost_links, "sizes", lambda: small)
            rows = cost_links.measure(once, lambda rows: kept.append(len(rows)), "cpu")
            assert kept == list(range(1, len(small) + 1))
            assert [(row["op"], row["bytes"]) for row in rows] == [call.key for call in small]
            assert cost_links.measure(once, lambda rows: None, "cpu", limit_s=-1) == []
    finally:
        dist.destroy_process_group()


# ---- the page ------------------------------------------------------------------------------------------------------


def test_every_table_has_its_place_on_the_page():
    text = (DOCS / "cost-model.md").read_text(encoding="utf-8")
    assert {name for _, name, _, _ in BLOCK.findall(text)} == cost_check.TABLES.keys()


def test_the_model_reads_the_grid_of_the_committed_run(tmp_path, monkeypatch):
    """What `cost_check.py ship` would write is what is shipped."""
    shipped = cost_check.SHIPPED.read_bytes()
    monkeypatch.setattr(cost_check, "SHIPPED", tmp_path / "cpkit.csv.gz")
    cost_check.ship()
    assert gzip.decompress(cost_check.SHIPPED.read_bytes()) == gzip.decompress(shipped)
    for point in cost_check.grid_points(cost_check.read(cost_check.RESULT)):
        table, heads = cpkit_tables("h200")[point["kernel"]]
        assert heads == point["heads"]
        assert table.read(point["rows"], point["keys"]).seconds == pytest.approx(1e-3 * point["ms"])
