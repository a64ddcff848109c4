"""The page of a replay: it parses, fetches nothing, escapes what it shows, and carries the report's numbers."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from cpkit.cli.main import main
from cpkit.report.html_levels import Levels
from cpkit.report.html_svg import HEIGHT, WIDTH, bars, columns, distribution, levels, nice
from cpkit.report.table import size

VOID = {"meta", "br", "hr"}
FETCHING = {"src", "href", "xlink:href", "srcset", "data", "action", "background", "poster"}


class Reader(HTMLParser):
    """Balanced tags, attributes and the text of a page."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


def make_page(capsys, tmp_path, *argv, name="trace.csv"):
    path = tmp_path / name
    lens = [(700, 9), (64, 5), (1, 1), (4000, 3), (300, 0)]
    lines = [f"{0.04 * i},{prompt},{output}" for i, (prompt, output) in enumerate(lens)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines]) + "\n")
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    flags = ["-tp", "2", "-pcp", "2", "-dcp", "4", "--processes", "1", "--html", str(page), "--json", str(figures)]
    code = main(["simulate", str(path), *flags, *argv])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "") and f"Page      {page}" in out
    return page.read_text(encoding="utf-8"), json.loads(figures.read_text()), out


@pytest.mark.parametrize("cost", [["--cost", "h200"], []], ids=["cost", "step-clock"])
def test_the_page_is_whole_and_carries_the_numbers(capsys, tmp_path, cost):
    text, data, out = make_page(capsys, tmp_path, *cost)
    reader = read(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(reader.tags)
    assert not [found for found in reader.attributes if found[1] in FETCHING or found[1].startswith("on")]
    assert not re.search(r"url\(|@import|https?:|//[a-z]", text)
    cells = {part.strip() for part in reader.text}
    numbers = [data[name] for name in ("requests", "finished", "refused", "steps", "tokens", "decode_tokens")]
    numbers += [data["peaks"]["kv_blocks"], data["peaks"]["workspace_tokens"], data["replay"]["num_kv_blocks"] - 1]
    numbers += [one["calls"] for one in data["collectives"]]
    assert {f"{number:,}" for number in numbers} <= cells
    assert {size(one["bytes"]) for one in data["collectives"]} <= cells
    assert {f"{two[q]:.3f}" for two in data["balance"].values() for q in ("p50", "p99")} <= cells
    assert out.partition("\n\nPage")[0].strip() in "".join(reader.text)
    assert "4 ranks of h200 cannot hold deepseek-v3.2" in "".join(reader.text).partition("Replay")[0]
    if cost:
        shown = "".join(reader.text)
        assert f"{data['cost']['prompt_tokens_s']:,.0f} prompt and" in shown
        assert all(name in shown for name in ("measured", "attend", "H200"))
    assert reader.tags.count("svg") == 5 + (2 if cost else 0)


def test_a_viewport_for_phones(capsys, tmp_path):
    text, _, _ = make_page(capsys, tmp_path)
    assert ("meta", "content", "width=device-width, initial-scale=1") in read(text).attributes


def test_names_are_escaped(capsys, tmp_path):
    text, _, _ = make_page(capsys, tmp_path, name="a<b>&'\"x.csv")
    assert "b" not in read(text).tags and "a<b>&'\"x.csv" in "".join(read(text).text)


PICTURES = {
    "distribution": lambda values: distribution("a <b>", values, lambda value: f"{value:.3g} s"),
    "levels": lambda values: levels("a <b>", [("x", values), ("y", values / 2)], 261.2, lambda value: f"{value:,.0f}"),
    "columns": lambda values: columns("a <b>", [(str(i), v) for i, v in enumerate(values)], "{:.3g}".format, "rank"),
    "bars": lambda values: bars("a <b>", [(f"<{i}>", v, f"{v:.3g}") for i, v in enumerate(values[:20])]),
}  # fmt: skip


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize(
    "values",
    [[], [0.0], [3.0], [0.0, 0.0, 5.0], [1.0, 1.0, 1.0], [1e-6, 1e3], list(np.linspace(0.1, 9, 256))],
    ids=["none", "zero", "one", "mostly-zero", "equal", "nine-decades", "256"],
)
def test_pictures_stay_on_their_sheet(kind, values):
    reader = read(PICTURES[kind](np.array(values, float)))
    box = next(value for tag, name, value in reader.attributes if (tag, name) == ("svg", "viewbox"))
    height = float(box.split()[3])
    for tag, name, value in reader.attributes:
        if name in ("x", "cx", "x1", "x2"):
            assert -0.01 <= float(value) <= WIDTH + 0.01, (tag, name, value)
        elif name in ("y", "cy", "y1", "y2"):
            assert -0.01 <= float(value) <= max(height, HEIGHT) + 0.01, (tag, name, value)
        elif name in ("width", "height") and tag == "rect":
            assert float(value) >= 0


@pytest.mark.parametrize(("number", "above"), [(37, 50), (0.012, 0.02), (1, 1), (50, 50), (51, 100), (1e-7, 1e-7)])
def test_nice(number, above):
    assert nice(number) == pytest.approx(above)


def test_levels_in_columns():
    seen = Levels(time_s=[0, 1, 7], held_blocks=[5, 9, 2], running=[1, 1, 1], waiting=[0, 0, 0])
    assert seen.columns("held_blocks", 4, 8.0).tolist() == [9, 9, 9, 2]
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0, 10, 300)).tolist()
    held = rng.integers(0, 99, 300).tolist()
    seen = Levels(times, held, held, held)
    slow, last = [], 0
    for column in range(50):
        inside = [h for t, h in zip(times, held, strict=True) if column / 5 <= t < (column + 1) / 5]
        last = max(inside) if inside else last
        slow.append(last)
    assert seen.columns("running", 50, 10.0).tolist() == slow
