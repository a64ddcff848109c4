"""The tables of docs/doctor.md, published.md and cost-model.md, made from the code; as a program it writes them anew.

    python -m tests.sizing.pages

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import re
from pathlib import Path

from benchmarks import cost_check
from cpkit.sizing.deployment import FEATURES
from cpkit.sizing.rules.backends import BACKENDS
from cpkit.sizing.rules.engines import NOTES, RULES
from tests.sizing.published.capacity import answers, figures
from tests.sizing.published.collectives import collective_rows
from tests.sizing.published.speed import speed_rows

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("doctor.md", "published.md", "cost-model.md")


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', ' or ') for cell in line)} |" for line in lines)


def plain(text):
    """{d.dcp} -> DCP's value, as the page writes it."""
    return re.sub(r"\{d\.([\w.]+)[^}]*\}", lambda found: f"*{found[1].replace('_', ' ')}*", text)


def rules_table(engine):
    rows = [
        [f"`{rule.id}`", plain(rule.sentence), plain(rule.change), rule.where + ("; derived" if rule.derived else "")]
        for rule in RULES[engine]
    ]
    return markdown(["id", "refused", "way out", "where"], rows)


def notes_table():
    rows = [[f"`{note.id}`", plain(note.sentence)] for notes in NOTES.values() for note in notes]
    return markdown(["id", "holds"], rows)


def backends_table():
    word = {True: "yes", False: "no", None: "not known"}
    rows = [
        [it.engine, f"`{it.name}`", word[it.pcp], word[it.dcp], word[it.both], ", ".join(it.archs or it.platforms)]
        for it in BACKENDS
    ]
    return markdown(["engine", "backend", "PCP", "DCP", "both", "chips"], rows)


def features_table():
    return markdown(["`--with`", "means"], [[f"`{name}`", what] for name, what in FEATURES.items()])


def number(value, unit):
    """1.98 × as it was published, or 47,702 B."""
    return f"{value:,.0f} {unit}" if value > 1000 else f"{value:.4g} {unit}".strip()


def capacity_table():
    rows = [
        [
            it.what,
            number(it.published, it.unit),
            number(it.ours, it.unit),
            f"{it.difference:+.1%}",
            "not judged" if it.within is None else f"{it.within:.0%}",
            it.inputs,
            it.source,
        ]
        for it in figures()
    ]
    return markdown(["what", "published", "ours", "difference", "bound", "inputs", "source"], rows)


def refusals_table():
    word = {True: "taken", False: "refused"}
    rows = [
        [
            it.model,
            it.tp,
            it.pcp,
            it.dcp,
            word[it.published],
            word[it.ours],
            ", ".join(f"`{rule}`" for rule in it.rules),
        ]
        for it in answers()
    ]
    return markdown(["model", "tp", "pcp", "dcp", "published", "ours", "rules that refuse"], rows)


def speed_table():
    header = ["what", "length", "published", "ours", "difference", "bound", "inputs", "source"]
    return markdown(header, speed_rows())


def collectives_table():
    return markdown(["what", "published", "ours", "bound", "inputs", "source"], collective_rows())


TABLES = {
    "vllm": lambda: rules_table("vllm"),
    "sglang": lambda: rules_table("sglang"),
    "cpkit": lambda: rules_table("cpkit"),
    "notes": notes_table,
    "backends": backends_table,
    "features": features_table,
    "capacity": capacity_table,
    "refusals": refusals_table,
    "speed": speed_table,
    "collectives": collectives_table,
    **cost_check.TABLES,
}
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def blocks(page):
    """Tables of a page by name, as they stand there."""
    return {name: text.strip() for _, name, text, _ in BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))}


def rewrite(page, tables):
    """Make the tables of a page anew; those of other names stay as they are."""
    text = (DOCS / page).read_text(encoding="utf-8")
    made = BLOCK.sub(lambda it: f"{it[1]}{tables[it[2]]() if it[2] in tables else it[3].strip()}\n{it[4]}", text)
    (DOCS / page).write_text(made, encoding="utf-8")


if __name__ == "__main__":
    for each in PAGES:
        rewrite(each, TABLES)
