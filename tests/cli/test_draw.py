"""`cpkit draw` as a shell sees it: a file of each kind, one clear line where it cannot be, the page's commands."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cpkit
from cpkit.cli.main import main, make_parser

STEP = "--seq-lens 10,900 --query-lens 1,700 -tp 2 -pcp 2 -dcp 4"
PAGE = (Path(cpkit.__file__).parents[1] / "docs" / "pictures.md").read_text(encoding="utf-8")


def draw(capsys, text):
    code = main(["draw", *shlex.split(text)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "text",
    [
        f"ownership {STEP}",
        f"chunks {STEP} --rank 3",
        f"work {STEP} --partition contiguous",
        f"traffic {STEP} --model glm-5.2",
        "capacity --chips h200,b200 -tp 4 -pcp 2 --weights-gib 60",
        "ttft -tp 2 -pcp 1,2 -dcp 1,4 --contexts 4k,9000",
    ],
    ids=lambda text: text.split()[0],
)
def test_a_file_of_each_kind(capsys, tmp_path, text):
    path = tmp_path / "picture.svg"
    code, out, err = draw(capsys, f"{text} -o {path}")
    assert (code, err) == (0, "") and out.startswith(f"{path}: ") and out.count("\n") == 1
    assert path.read_text(encoding="utf-8").rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param(f"work {STEP} -o x.pdf", "x.pdf: a picture's name ends in .png or .svg", id="suffix"),
        pytest.param(f"work {STEP} -o nowhere/x.png", "there is no folder nowhere", id="folder"),
        pytest.param("work -o x.png", "no step to plan", id="no-step"),
        pytest.param("ownership --seq-lens '' --query-lens '' -o x.png", "no tokens to draw", id="no-requests"),
        pytest.param("chunks --seq-lens 10 --query-lens 1 -o x.png", "no prefill chunk to draw", id="decodes-alone"),
        pytest.param("traffic --seq-lens 10 --query-lens 10 -o x.png", "no collectives to draw", id="one-rank"),
        pytest.param("chunks --seq-lens 9 --query-lens 9 --rank 1 -o x.png", "rank 1", id="rank-outside"),
        pytest.param("capacity --chips h200,h200 -o x.png", "each once", id="chip-twice"),
        pytest.param("capacity --chips h300 -o x.png", "unknown chip 'h300'", id="chip"),
        pytest.param("capacity --chips h100 -tp 1 -o x.png", "no room for KV on h100", id="no-room"),
        pytest.param("capacity -tp 0 -o x.png", "tp=0: every size is a whole number from 1", id="no-ranks"),
        pytest.param("capacity -tp 7 -o x.png", "nothing to draw for h200: ", id="heads"),
        pytest.param("ttft -tp 3 -pcp 2 -dcp 5 -o x.png", "0 legal worlds", id="no-world"),
        pytest.param("ttft --contexts 0,9 -o x.png", "--contexts: from 1 to", id="context"),
        pytest.param("pareto missing.jsonl -o x.png", "missing.jsonl: No such file", id="no-results"),
        pytest.param("sunset -o x.png", "invalid choice: 'sunset'", id="kind"),
        pytest.param(f"work {STEP}", "-o/--out", id="no-file"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(capsys, tmp_path, monkeypatch, text, told):
    monkeypatch.chdir(tmp_path)
    code, out, err = draw(capsys, text)
    assert code == 2 and out == "" and err.count("\n") == 1 and told in err
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = draw(capsys, f"work {STEP} -o {tmp_path / 'x.png'}")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "pictures are drawn by matplotlib" in err and "pip install -c constraints.txt '.[plot]'" in err


def test_help_needs_neither_numpy_nor_matplotlib():
    program = (
        "import sys; from cpkit.cli.main import main; code = main(['draw', 'ownership', '--help']);"
        "print(code, sorted({'numpy', 'matplotlib', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 []" and "Borders between requests are marked" in done.stdout


def test_pareto_takes_its_aim_from_the_report_or_the_flags(capsys, tmp_path):
    candidate = {"gpus": 8, "tp": 8, "pcp": 1, "dcp": 1, "interleave": 64, "block_size": 64}
    candidate |= {"partition": "head_tail", "max_num_batched_tokens": 8192}
    outcome = {
        "candidate": candidate,
        "ttft_s": [1, 2],
        "tpot_s": [0.01, 0.02],
        "queue_s": [0, 0],
        "tokens_s_gpu": 100.0,
    }
    outcome |= {"capacity": 9000, "kv_peak": 0.5, "busy": 0.9, "prefix_hit_rate": 0.0, "finished": 4, "refused": 0}
    outcome |= {"preemptions": 0, "steps": 9, "wall_s": 1.0}
    report = {"format": "cpkit-sweep-report-1", "model": "m", "chip": "h200", "trace": {"name": "t.csv"}}
    report |= {"aim": {"ttft_p99_s": 3.0, "tpot_p99_s": 0.05}, "best": [outcome], "losers": []}
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(report, indent=1))
    images = []
    for flags in ("", "--ttft 3 --tpot 0.05", "--ttft 7"):
        code, out, _ = draw(capsys, f"pareto {path} {flags} -o {tmp_path / 'x.png'}")
        assert code == 0 and "1 deployment of a sweep, 1 not beaten: m on h200, t.csv" in out
        images.append((tmp_path / "x.png").read_bytes())
    assert images[0] == images[1] != images[2]


def test_the_pages_commands_parse():
    commands = re.findall(r"^cpkit (.*)", PAGE.replace("\\\n", " "), re.MULTILINE)
    assert len(commands) >= 9
    for command in commands:
        make_parser().parse_args(shlex.split(command))


def test_the_pages_images_are_there():
    folder = Path(cpkit.__file__).parents[1] / "docs"
    images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert len(images) >= 8
    assert all((folder / image).stat().st_size > 1000 for image in images)
