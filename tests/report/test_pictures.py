"""Pictures: what they count, beside slow counts, and that no words lie on others at 4 and at 256 ranks."""

import itertools
import json
import warnings
from collections import Counter, defaultdict

import numpy as np
import pytest

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.errors import InputError
from cpkit.model import load_config, load_model, published_fields
from cpkit.report.pictures import canvas
from cpkit.report.pictures.capacity import draw_capacity, fits
from cpkit.report.pictures.chunks import draw_chunks
from cpkit.report.pictures.labels import place_labels
from cpkit.report.pictures.ownership import computed_share, cut_columns, draw_ownership, stored_share
from cpkit.report.pictures.pareto import draw_pareto
from cpkit.report.pictures.sweep_file import Sweep, read_sweep
from cpkit.report.pictures.traffic import collectives_by_name, draw_traffic
from cpkit.report.pictures.ttft import TtftSetting, draw_ttft, prefill_curve
from cpkit.report.pictures.work import draw_work
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.clock import PlannedClock
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.memory.deployment import Limits
from cpkit.sizing.sweep.candidates import Candidate
from cpkit.sizing.sweep.choice import Aim
from cpkit.sizing.sweep.replay import Outcome
from cpkit.sizing.weights import load_weights
from cpkit.topology import Topology

MODEL = load_model("deepseek-v3.2")
MIXED = Batch.from_lens([10, 200, 9, 1], [1, 1, 7, 1], [9, 199, 9, 1])


def make_plan(batch, sizes, **choices):
    budget = default_budget(MODEL, max_num_batched_tokens=1 << 20)
    return StepSettings(Topology(**sizes), MODEL, budget, **choices).plan(batch)


# ---- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [1, 5, 40, 1000], ids=lambda wanted: f"{wanted}-columns")
@pytest.mark.parametrize("batch", [MIXED, Batch.from_lens([1], [1]), Batch.from_lens([5, 0, 70], [5, 0, 70])])
def test_columns_cover_every_position_in_order(batch, wanted):
    plan = make_plan(batch, {})
    columns = cut_columns(plan, wanted)
    spans = list(
        zip(*(part.tolist() for part in (columns.req, columns.start, columns.stop, columns.is_new)), strict=True)
    )
    once = [span for span, _ in itertools.groupby(spans)]  # narrow parts are repeated
    covered = [(req, pos, new) for req, start, stop, new in once for pos in range(start, stop)]
    lens = zip(batch.num_computed.tolist(), batch.seq_lens.tolist(), strict=True)
    assert covered == [(req, pos, int(pos >= done)) for req, (done, n) in enumerate(lens) for pos in range(n)]


@pytest.mark.parametrize("partition", ["head_tail", "head_tail_even", "contiguous", "round_robin"])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tp": 2, "pcp": 2, "dcp": 4}, id="4-ranks"),
        pytest.param({"pcp": 3}, id="pcp-alone"),
        pytest.param({"tp": 4, "dcp": 2, "interleave": 64}, id="dcp-alone"),
        pytest.param({"tp": 2, "pcp": 2, "dcp": 2, "interleave": 4}, id="dcp-is-pcp"),
    ],
)
def test_shares_beside_a_token_by_token_count(sizes, partition):
    plan = make_plan(MIXED, sizes, partition=partition)
    columns = cut_columns(plan, 50)
    computed, stored = computed_share(plan, columns), stored_share(plan, columns)
    for at, rank in enumerate(plan.ranks):
        rows = rank.rows
        req_of = np.repeat(rows.req, rows.num_tokens).tolist()
        mine = set(zip(req_of, rows.positions().tolist(), strict=True))
        topology = plan.topology
        for column, (req, start, stop) in enumerate(zip(columns.req, columns.start, columns.stop, strict=True)):
            span = range(int(start), int(stop))
            assert computed[at, column] == sum((int(req), pos) in mine for pos in span) / len(span)
            turns = [pos // topology.interleave % topology.dcp for pos in span]
            assert stored[at, column] == turns.count(rank.dcp_rank) / len(span)


def test_traffic_sums_to_the_plans():
    plan = make_plan(MIXED, {"tp": 2, "pcp": 2, "dcp": 4})
    calls, sizes = defaultdict(int), defaultdict(int)
    layers = zip(plan.model.layers, plan.collectives.layers, strict=True)
    for num, one in [(layer.num_layers, one) for layer, found in layers for one in found] + [
        (1, one) for one in plan.collectives.step
    ]:
        calls[one.what, one.op, one.group] += num * one.times
        sizes[one.what, one.op, one.group] += num * one.bytes
    rows = collectives_by_name(plan)
    assert {row[:3]: (row[3].calls, row[3].bytes) for row in rows} == {k: (calls[k], sizes[k]) for k in calls}
    assert [row[3].bytes for row in rows] == sorted(sizes.values(), reverse=True)


def ttft_setting(**limits):
    weights = load_weights("deepseek-v3.2", MODEL)
    return TtftSetting(MODEL, weights, chip("h200"), 2, default_budget(MODEL, **limits), Assumptions())


@pytest.mark.parametrize("length", [1, 511, 512, 513, 1300])
def test_time_to_first_token_is_the_sum_of_a_prompts_steps(length):
    setting = ttft_setting(max_num_batched_tokens=512)
    curve = prefill_curve(setting, [length], pcp=2, dcp=4)
    settings = StepSettings(curve.topology, MODEL, setting.budget)
    clock = PlannedClock(CostModel(MODEL, setting.weights, curve.topology, setting.chip), settings)
    left, done, seconds = length, 0, 0.0
    while left:
        query = min(left, 512)
        done, left = done + query, left - query
        seconds += clock.step_seconds(Batch.from_lens([done], [query], [length]))
    assert curve.seconds == pytest.approx((seconds,))


def make_outcome(gpus, tp, pcp, dcp, ttft, tpot, rate, capacity, tokens=8192):
    candidate = Candidate(gpus, tp, pcp, dcp, 64, 64, "head_tail", tokens)
    return Outcome(
        candidate, (ttft / 2, ttft), (tpot / 2, tpot), (0, 0), rate, capacity, 0.5, 0.9, 0.1, 9, 0, 0, 9, 1.0
    )


def make_sweep(num):
    """Deployments on two curves that cross, some close together, and as many that all others beat."""
    best = [
        make_outcome(8 << (i % 4), 1 << (i % 3), 2, 1, 0.5 + i // 2, 0.02 + i / 900, 99 * i + 9, 5000 + i)
        for i in range(num)
    ]
    return Sweep(tuple(best) + tuple(make_outcome(8, 8, 1, 1, 90 + i, 2 + i, 1, 10) for i in range(num)), "made", Aim())


def test_both_files_of_a_sweep_are_read(tmp_path):
    outcomes = make_sweep(3).outcomes
    lines = tmp_path / "results.jsonl"
    head = {"format": "cpkit-sweep-1", "cpkit": "0", "trace": "t.csv", "model": "m", "chip": "h200", "sweep": "x"}
    text = "".join(json.dumps(row) + "\n" for row in [head, *(one.to_json() for one in outcomes)])
    lines.write_text(text + '{"cut short by an inter')
    assert read_sweep(lines) == Sweep(outcomes, "m on h200, t.csv", Aim())
    report = tmp_path / "report.json"
    data = {"format": "cpkit-sweep-report-1", "model": "m", "chip": "h200", "trace": {"name": "t.csv"}}
    data |= {"aim": {"ttft_p99_s": 3.0, "tpot_p99_s": 0.05}, "best": [outcomes[0].to_json()]}
    data["losers"] = [{**one.to_json(), "beaten_by": {}, "reason": "slow"} for one in outcomes[1:]]
    report.write_text(json.dumps(data, indent=1))
    assert read_sweep(report) == Sweep(outcomes, "m on h200, t.csv", Aim(3.0, 0.05))


@pytest.mark.parametrize(
    "text",
    [b"", b"no JSON", b"\xff\xfe", b"[]", b'{"format": "other"}\n', b'{"format": "cpkit-sweep-1"}\n', b"{}", b"3"],
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "file"
    path.write_bytes(text)
    with pytest.raises(InputError):
        read_sweep(path)


def test_a_sweep_that_served_nothing_is_not_drawn(tmp_path):
    head = {"format": "cpkit-sweep-1", "cpkit": "0", "trace": "t.csv", "model": "m", "chip": "h200", "sweep": "x"}
    rows = [head, *({**one.to_json(), "finished": 0, "refused": 9} for one in make_sweep(2).outcomes)]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="no deployment of this sweep served a request"):
        read_sweep(path)


# ---- what is drawn ---------------------------------------------------------------------------------------------------


@pytest.fixture
def figures(monkeypatch):
    """Figures as they are saved, each with the texts that were drawn and their boxes: (figure, {text: box})."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    kept, save, draw, boxes = [], Figure.savefig, Text.draw, {}

    def saved(figure, *args, **options):
        boxes.clear()  # of layout
        save(figure, *args, **options)
        kept.append((figure, list(boxes.values())))

    def drawn(text, renderer):
        draw(text, renderer)
        if text.get_visible() and text.get_text().strip():
            boxes[id(text)] = text.get_text(), Text.get_window_extent(text, renderer)  # an annotation without its line

    monkeypatch.setattr(Figure, "savefig", saved)
    monkeypatch.setattr(Text, "draw", drawn)
    return kept


def check_words(figure, words):
    """No text that was drawn lies on another, and none leaves the sheet."""
    width, height = (canvas.DPI * inches for inches in figure.get_size_inches())
    assert len(words) > 8
    for text, box in words:
        assert box.x0 >= -1 and box.x1 <= width + 1, f"{text!r} leaves the sheet sideways"
        assert box.y0 >= -1 and box.y1 <= height + 1, f"{text!r} leaves the sheet"
    for (one, a), (other, b) in itertools.combinations(words, 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 1 or high <= 2, f"{one!r} lies on {other!r}"


STEPS = {
    "4-ranks": (MIXED, {"tp": 2, "pcp": 2, "dcp": 4}),
    "4-ranks-1M": (Batch.from_lens([400_000, 9, 600_000], [1, 9, 90_000]), {"tp": 2, "pcp": 2, "dcp": 4}),
    "256-ranks-1M": (Batch.from_lens([1_000_000], [1_000_000]), {"tp": 8, "pcp": 32, "dcp": 256, "interleave": 64}),
}  # fmt: skip
DRAWERS = {
    "ownership": draw_ownership,
    "work": draw_work,
    "traffic": draw_traffic,
    "chunks": lambda plan, path: draw_chunks(plan, plan.ranks[0], path),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", DRAWERS)
def test_words_of_a_step(figures, tmp_path, kind, step):
    batch, sizes = STEPS[step]
    title = DRAWERS[kind](make_plan(batch, sizes), tmp_path / "picture.png")
    check_words(*figures[0])
    assert figures[0][0].get_suptitle().replace("\n", " ") == title
    assert "counted from the plan" in figures[0][0].get_supxlabel().replace("\n", " ")


def test_words_of_capacity(figures, tmp_path):
    limits = Limits(published_fields(*load_config("deepseek-v3.2")), MODEL.max_model_len)
    lines = [fits(MODEL, "vllm", chip(name), limits, tp=8, pcp=1) for name in ("h100", "h200", "b200")]
    draw_capacity(lines, tmp_path / "picture.png")
    check_words(*figures[0])
    gains = {text for text, _ in figures[0][1] if text.endswith("x")}
    for line in lines[1:]:  # h100 has no room
        least, *more = [fit.memory.tokens for fit in line.fits]
        assert {f"{tokens / least:.2f}x" for tokens in more} <= gains, "each chip's own"
    caption = figures[0][0].get_supxlabel().replace("\n", " ")
    assert "Hollow: refused by vllm-flashmla-padding (h200 dcp 8; b200 dcp 8)" in caption
    assert "Not drawn: h100 dcp 1: no room for KV" in caption
    assert all(kind in caption for kind in ("Counted", "Hardware file", "Assumed"))


def test_what_is_missing_for_one_reason_is_told_once(figures, tmp_path):
    limits = Limits(published_fields(*load_config("deepseek-v3.2")), MODEL.max_model_len)
    draw_capacity(
        [fits(MODEL, "sglang", chip(name), limits, tp=8, pcp=1) for name in ("h200", "h100")], tmp_path / "a.png"
    )
    caption = figures[0][0].get_supxlabel().replace("\n", " ")
    assert "Hollow: refused by sglang-dcp-backend (h200 dcp 2, 4, 8)." in caption
    assert caption.count("Not drawn") == 1 and "Not drawn: h100 dcp 1, 2, 4, 8: no room for KV on h100" in caption


def test_words_of_ttft(figures, tmp_path):
    setting = ttft_setting()
    worlds = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 4), (4, 8)]
    curves = [prefill_curve(setting, [1, 4096, 8192, 20_000], pcp=pcp, dcp=dcp) for pcp, dcp in worlds]
    draw_ttft(setting, curves, tmp_path / "picture.png")
    check_words(*figures[0])
    assert "% measured" in figures[0][0].get_supxlabel() and "estimate" in figures[0][0].get_supxlabel()


@pytest.mark.parametrize("num", [1, 40])
def test_words_of_pareto(figures, tmp_path, num):
    draw_pareto(make_sweep(num), Aim(), tmp_path / "picture.png")
    check_words(*figures[0])
    words = [text.get_text() for text in figures[0][0].axes[2].texts]
    assert sum(word.endswith("take") for word in words) == 1 and any(word.startswith("grey: ") for word in words)
    gpus = Counter(word.partition(" GPUs ")[0] for word in words if " GPUs " in word)
    assert gpus == ({"8": 1} if num == 1 else dict.fromkeys(["8", "16", "32", "64"], 6)), "all have their turns"
    assert [ax.get_xscale() for ax in figures[0][0].axes[:2]] == ["log", "log"], "rates of 1 and 9 tokens/s and more"


def test_outcomes_without_time_between_tokens_are_drawn_too(figures, tmp_path):
    outcomes = (make_outcome(8, 8, 1, 1, 2.0, 0.0, 90, 10), make_outcome(16, 8, 2, 1, 1.0, 0.0, 50, 20))
    with warnings.catch_warnings(action="error"):
        draw_pareto(Sweep(outcomes, "made", Aim()), Aim(), tmp_path / "picture.png")
    check_words(*figures[0])
    assert [ax.get_yscale() for ax in figures[0][0].axes[:2]] == ["log", "linear"]
    assert [ax.get_xscale() for ax in figures[0][0].axes[:2]] == ["linear", "linear"], "rates of 50 and 90"


def test_labels_keep_off_points_without_one(figures, tmp_path):
    with canvas.sheet(tmp_path / "picture.png", "t", ["c"], width=6, height=4) as figure:
        ax = figure.subplots()
        ax.set(xlim=(0, 10), ylim=(0, 10))
        others = [(5 + dx / 4, 5 + dy / 4) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]
        figure.draw_without_rendering()
        place_labels(ax, [(5, 5, "7")], ringed=None, others=others)
        places = ax.transData.transform(others)
    (box,) = [box for text, box in figures[0][1] if text == "7"]
    assert not any(box.x0 <= x * canvas.DPI / figure.dpi <= box.x1 and box.y0 <= y <= box.y1 for x, y in places)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_equal_values_give_equal_bytes(tmp_path, suffix):
    plan = make_plan(MIXED, {"tp": 2, "pcp": 2, "dcp": 4})
    files = []
    for name in ("one", "other"):
        path = tmp_path / f"{name}.{suffix}"
        draw_work(plan, path)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    assert b"Date" not in files[0] and b"Matplotlib v" not in files[0] and b"dc:date" not in files[0]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (1234, "1.23k"), (999_999, "1M"), (2.5e13, "25T"), (0.25, "0.25"), (1e6, "1M")],
)
def test_short(number, text):
    assert canvas.short(number) == text


@pytest.mark.parametrize(("num_ranks", "last"), [(1, 0), (4, 3), (16, 15), (17, 16), (32, 31), (256, 255), (1000, 999)])
def test_rank_ticks(num_ranks, last):
    ticks = canvas.rank_ticks(num_ranks)
    assert ticks[0] == 0 and ticks[-1] == last and len(ticks) <= 17 and ticks == sorted(set(ticks))
