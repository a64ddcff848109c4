"""The table of injected faults in docs/consistency.md: measured by launches here, kept as data, drawn from that.

python -m tests.run.fault_table        launches jobs of four ranks, writes DATA and the table; some minutes
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cpkit.run.injection import KINDS
from tests.run.injected import LIMIT_S, simulate

ROOT = Path(__file__).parents[2]
DATA = ROOT / "benchmarks" / "results" / "injected.json"
PAGE = ROOT / "docs" / "consistency.md"
BEGIN, END = "<!-- injected faults: begin -->\n", "<!-- injected faults: end -->\n"
COMMS = ("simulator", "gloo", "MPI")
LAUNCH = {
    "gloo": [sys.executable, "-m", "tests.forking_torchrun", "--standalone", "--nproc-per-node"],
    "MPI": [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe", "-n"],
}
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def launch(comm, folder, cases):
    """One job of four ranks with these cases: its exit status, and what it printed."""
    python = [sys.executable] if comm == "MPI" else []
    command = [*LAUNCH[comm], "4", *python, "-m", "tests.run.injected", str(folder), "4", "cpu", *cases]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=400, check=False)
    return done.returncode, done.stdout + done.stderr


def told(folder, case):
    """What each rank that lived raised in a case, and how many seconds after the fault; by rank."""
    began = float((folder / f"{case}.began").read_text())
    ranks = {int(path.suffix[1:]): json.loads(path.read_text()) for path in folder.glob(f"{case}.[0-9]")}
    return {rank: (one["text"], one["at"] - began) for rank, one in sorted(ranks.items())}


def measured():
    """{kind: {comm: {"seconds": until the last waiting rank raised, "text"}}}"""
    out = {kind: {} for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            text, seconds = simulate(kind, "every", folder)
            out[kind]["simulator"] = {"seconds": round(seconds, 2), "text": text}
        for comm in LAUNCH:
            part = folder / comm
            part.mkdir()
            launch(comm, part, [f"{kind}.every" for kind in KINDS if kind != "killed"])
            launch(comm, part, ["killed.every"])
            for kind in KINDS:
                ranks = told(part, f"{kind}.every")
                others = [seconds for rank, (_, seconds) in ranks.items() if rank != 2]
                [text] = {text for text, _ in ranks.values()}
                out[kind][comm] = {"seconds": round(max(others), 2), "text": text}
    return out


def drawn(data):
    """The table: a row a kind, the text that all ranks raised, and seconds to it on each comm."""
    lines = [
        "| kind | what the ranks raise | " + " | ".join(f"{comm}, s" for comm in COMMS) + " |",
        "| --- | --- |" + " --- |" * len(COMMS),
    ]
    for kind, by_comm in data.items():
        texts = dict.fromkeys(_short(by_comm[comm]["text"]) for comm in reversed(COMMS))
        seconds = " | ".join(f"{by_comm[comm]['seconds']:.2f}" for comm in COMMS)
        lines.append(f"| `{kind}` | {'<br>in the simulator: '.join(f'`{text}`' for text in texts)} | {seconds} |")
    return "\n".join(lines) + "\n"


def _short(text):
    """The first two lines of a text; places in the program without their lines, which move."""
    short = ": ".join(line.strip() for line in text.splitlines()[:2]).replace("|", "/")
    return re.sub(r"(\.py):\d+", r"\1", short)


def page_with(table):
    """The page with this table between its marks."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


if __name__ == "__main__":
    data = measured()
    DATA.write_text(json.dumps({"limit_s": LIMIT_S, "kinds": data}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page_with(drawn(data)), encoding="utf-8")
    os._exit(0)  # the simulated rank that was killed still waits in its thread
